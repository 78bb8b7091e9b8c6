/* Walks the frames of a thread as memory and time profilers do: whenever memory is allocated or freed, and in a signal
   handler that runs between any two instructions. It takes no lock and reads the interpreter's structures as they are,
   so all pointers that can be reached from the thread state must be valid at each of these moments.
   test_frame_walkers.py compiles this file with the interpreter's own headers. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_BUILD_CORE 1
#include <errno.h>
#include <Python.h>
#include <internal/pycore_frame.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe_structs.h>
#endif
#undef Py_BUILD_CORE

#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static PyThreadState *watched;
static atomic_long allocations, signals, deepest;
static volatile uintptr_t sink;

static void fail(const char *what)
{
    static const char text[] = "frame_walker: ";
    if (write(2, text, sizeof text - 1) < 0 || write(2, what, strlen(what)) < 0 || write(2, "\n", 1) < 0) {
        _exit(3);
    }
    abort();
}

static void check_object(PyObject *object)
{
    if (object == NULL) {
        return;
    }
    PyTypeObject *type = Py_TYPE(object);
    if (Py_REFCNT(object) <= 0 || type == NULL || Py_TYPE(type) == NULL || type->tp_name == NULL) {
        fail("a frame refers to an object that is not valid");
    }
    sink += (unsigned char)type->tp_name[0];
}

static PyObject *code_of(_PyInterpreterFrame *frame)
{
#if PY_VERSION_HEX >= 0x030E0000
    return (PyObject *)(frame->f_executable.bits & ~(uintptr_t)3);
#elif PY_VERSION_HEX >= 0x030D0000
    return frame->f_executable;
#else
    return (PyObject *)frame->f_code;
#endif
}

static _PyInterpreterFrame *innermost(PyThreadState *thread)
{
#if PY_VERSION_HEX >= 0x030D0000
    return thread->current_frame;
#else
    return thread->cframe->current_frame;
#endif
}

/* Walk the frames, the exceptions that are being handled, and the chunks of memory that hold the frames. */
static void walk(PyThreadState *thread)
{
    long depth = 0;
    for (_PyInterpreterFrame *frame = innermost(thread); frame != NULL; frame = frame->previous) {
        if (++depth > 100000) {
            fail("the chain of frames does not end");
        }
        if ((unsigned char)frame->owner > 8) {
            fail("a frame has an unknown owner");
        }
        check_object(code_of(frame));
        if (PyCode_Check(code_of(frame))) {
            sink += ((PyCodeObject *)code_of(frame))->co_firstlineno;
        }
    }
    if (depth > atomic_load(&deepest)) {
        atomic_store(&deepest, depth);
    }
    depth = 0;
    for (_PyErr_StackItem *item = thread->exc_info; item != NULL; item = item->previous_item) {
        if (++depth > 100000) {
            fail("the chain of exceptions does not end");
        }
        check_object(item->exc_value);
    }
    for (_PyStackChunk *chunk = thread->datastack_chunk; chunk != NULL; chunk = chunk->previous) {
        if (chunk->size < 64 || chunk->size > ((size_t)1 << 32)) {
            fail("a chunk of frames has an impossible length");
        }
    }
}

/* ---------------------------------------------------------------------------- at each allocation */

static PyMemAllocatorEx original[2];

static void look(void)
{
    PyThreadState *thread = PyThreadState_GetUnchecked();
    if (thread != NULL && thread == watched) {
        atomic_fetch_add(&allocations, 1);
        walk(thread);
    }
}

static void *hooked_malloc(void *context, size_t size)
{
    look();
    PyMemAllocatorEx *of = context;
    return of->malloc(of->ctx, size);
}

static void *hooked_calloc(void *context, size_t count, size_t size)
{
    look();
    PyMemAllocatorEx *of = context;
    return of->calloc(of->ctx, count, size);
}

static void *hooked_realloc(void *context, void *block, size_t size)
{
    look();
    PyMemAllocatorEx *of = context;
    return of->realloc(of->ctx, block, size);
}

static void hooked_free(void *context, void *block)
{
    look();
    PyMemAllocatorEx *of = context;
    of->free(of->ctx, block);
}

static const PyMemAllocatorDomain domains[2] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};

static PyObject *hook_allocations(PyObject *module, PyObject *unused)
{
    watched = PyThreadState_Get();
    for (int i = 0; i < 2; i++) {
        PyMem_GetAllocator(domains[i], &original[i]);
        PyMemAllocatorEx hooked = {&original[i], hooked_malloc, hooked_calloc, hooked_realloc, hooked_free};
        PyMem_SetAllocator(domains[i], &hooked);
    }
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------- at any instruction */

static pthread_t target, sender;
static atomic_int sending;
static int second;
static uintptr_t first_address, last_address;

static uintptr_t address_of(ucontext_t *context)
{
#if defined(__x86_64__)
    return (uintptr_t)context->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (uintptr_t)context->uc_mcontext.pc;
#else
    return 0;
#endif
}

static void handle(int number, siginfo_t *info, void *context)
{
    uintptr_t address = address_of(context);
    if (first_address <= address && address < last_address) {
        atomic_fetch_add(&signals, 1);
        walk(watched);
    }
}

/* Remember the addresses of the library if its file name ends with `name`. */
static int find_library(struct dl_phdr_info *info, size_t size, void *name)
{
    size_t length = strlen(info->dlpi_name), wanted = strlen(name);
    if (length < wanted || strcmp(info->dlpi_name + length - wanted, name) != 0) {
        return 0;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD && header->p_flags & PF_X) {
            first_address = info->dlpi_addr + header->p_vaddr;
            last_address = first_address + header->p_memsz;
        }
    }
    return 1;
}

static void *send(void *unused)
{
    for (long count = 0; atomic_load(&sending); count++) {
        struct timespec pause = {0, 20000 + count % 7 * 3000};
        nanosleep(&pause, NULL);
        pthread_kill(target, count % 4 == 0 && second != 0 ? second : SIGPROF);
    }
    return NULL;
}

/* begin_signals(library, second): send SIGPROF to this thread again and again. The handler walks the frames if it has
   interrupted code of that library (None: any code). Every fourth signal is `second` instead, unless that is 0. */
static PyObject *begin_signals(PyObject *module, PyObject *args)
{
    const char *library;
    if (!PyArg_ParseTuple(args, "zi", &library, &second)) {
        return NULL;
    }
    first_address = 0;
    last_address = UINTPTR_MAX;
    if (library != NULL && !dl_iterate_phdr(find_library, (void *)library)) {
        PyErr_SetString(PyExc_LookupError, library);
        return NULL;
    }
    watched = PyThreadState_Get();
    target = pthread_self();
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_RESTART | SA_SIGINFO};
    sigaction(SIGPROF, &action, NULL);
    atomic_store(&sending, 1);
    if ((errno = pthread_create(&sender, NULL, send, NULL)) != 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* Stop the signals and restore the allocators. Return the number of walks in the handler, the number of walks at
   allocations and frees, and the largest number of frames. */
static PyObject *end(PyObject *module, PyObject *unused)
{
    if (atomic_exchange(&sending, 0)) {
        pthread_join(sender, NULL);
    }
    if (original[0].malloc != NULL) {
        for (int i = 0; i < 2; i++) {
            PyMem_SetAllocator(domains[i], &original[i]);
        }
    }
    return Py_BuildValue("lll", atomic_load(&signals), atomic_load(&allocations), atomic_load(&deepest));
}

static PyMethodDef functions[] = {
    {"hook_allocations", hook_allocations, METH_NOARGS, NULL},
    {"begin_signals", begin_signals, METH_VARARGS, NULL},
    {"end", end, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "frame_walker", NULL, -1, functions};

PyMODINIT_FUNC PyInit_frame_walker(void)
{
    return PyModule_Create(&definition);
}
