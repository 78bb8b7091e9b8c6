/* C functions that keep data on the C stack, or state in the processor, while a Python function that they call yields.
   Compiled by test_stacks.py and called through ctypes.PyDLL, which holds the GIL and checks for exceptions. */

#include <fenv.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct _object PyObject;
extern PyObject *PyObject_CallNoArgs(PyObject *);
extern void Py_DecRef(PyObject *);

static unsigned char byte_at(uint32_t seed, size_t index)
{
    uint32_t x = seed * 2654435761u + (uint32_t)index * 40503u;
    return (unsigned char)(x >> 13 ^ x);
}

/* Call the callback. Return -1 with an exception set if it raises. */
static long call(PyObject *callback)
{
    PyObject *result = PyObject_CallNoArgs(callback);
    if (result == NULL) {
        return -1;
    }
    Py_DecRef(result);
    return 0;
}

/* Keep `len` known bytes on the stack during `times` calls. After each call, check the bytes and their address. Return
   how many of these checks failed, or -1 on an error. */
long hold(PyObject *callback, size_t len, uint32_t seed, long times)
{
    volatile unsigned char local[len];
    volatile unsigned char *volatile where = local;
    long wrong = 0;
    for (size_t i = 0; i < len; i++) {
        local[i] = byte_at(seed, i);
    }
    for (long round = 0; round < times; round++) {
        if (call(callback) < 0) {
            return -1;
        }
        wrong += where != local;
        for (size_t i = 0; i < len; i++) {
            wrong += where[i] != byte_at(seed, i);
        }
    }
    return wrong;
}

/* Keep `len` known bytes in each of `depth` + 1 nested C frames. The innermost frame calls back once. Return how many
   bytes were wrong afterwards, or -1 on an error. */
long hold_nested(PyObject *callback, size_t len, uint32_t seed, long depth)
{
    volatile unsigned char local[len];
    long wrong;
    for (size_t i = 0; i < len; i++) {
        local[i] = byte_at(seed + (uint32_t)depth, i);
    }
    wrong = depth > 0 ? hold_nested(callback, len, seed, depth - 1) : call(callback);
    if (wrong < 0) {
        return -1;
    }
    for (size_t i = 0; i < len; i++) {
        wrong += local[i] != byte_at(seed + (uint32_t)depth, i);
    }
    return wrong;
}

static const int modes[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};

/* Return the current rounding mode as an index of `modes`, or -1 if it is not one of them. */
long rounding(void)
{
    for (int mode = 0; mode < 4; mode++) {
        if (fegetround() == modes[mode]) {
            return mode;
        }
    }
    return -1;
}

static double third(void)
{
    volatile double one = 1.0, three = 3.0;
    return one / three;
}

#if defined(__x86_64__)
static void get_control(uint32_t *mxcsr, uint16_t *x87)
{
    __asm__ volatile("stmxcsr %0" : "=m"(*mxcsr));
    __asm__ volatile("fnstcw %0" : "=m"(*x87));
}

static void set_control(uint32_t mxcsr, uint16_t x87)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(mxcsr));
    __asm__ volatile("fldcw %0" : : "m"(x87));
}
#endif

/* Set the rounding mode, and call back `times` times. On x86-64, bit 0 of `mode` also chooses whether denormals are
   flushed, and bit 1 chooses the x87 precision. Return how many checks after the calls found other settings, or -1 on
   an error. The caller's state is restored. */
long hold_rounding(PyObject *callback, int mode, long times)
{
    const int before = fegetround();
    long wrong = 0;
#if defined(__x86_64__)
    uint32_t mxcsr_before, mxcsr_held, mxcsr;
    uint16_t x87_before, x87_held, x87;
    get_control(&mxcsr_before, &x87_before);
#endif
    fesetround(modes[mode & 3]);
    const double expected = third();
#if defined(__x86_64__)
    get_control(&mxcsr_held, &x87_held);
    mxcsr_held = (mxcsr_held & ~0x3fu) | (mode & 1 ? 0x8040u : 0u);
    x87_held = (uint16_t)((x87_held & ~0x300u) | (mode & 2 ? 0x200u : 0x300u));
    set_control(mxcsr_held, x87_held);
#endif
    for (long round = 0; round < times && wrong >= 0; round++) {
        if (call(callback) < 0) {
            wrong = -1;
            break;
        }
        wrong += fegetround() != modes[mode & 3];
        wrong += third() != expected;
#if defined(__x86_64__)
        get_control(&mxcsr, &x87);
        wrong += (mxcsr & ~0x3fu) != mxcsr_held; /* the low bits are the exceptions that have happened */
        wrong += x87 != x87_held;
#endif
    }
#if defined(__x86_64__)
    set_control(mxcsr_before, x87_before);
#endif
    fesetround(before);
    return wrong;
}

#if defined(__x86_64__)
/* Hold known values in all callee-saved registers during `PyObject_CallNoArgs(callback)`. rdi = callback, rsi = seed,
   rdx = where to store the result. Return how many registers were wrong. */
long held_call(PyObject *callback, uint64_t seed, PyObject **result);
__asm__(
    ".text\n"
    ".globl held_call\n"
    ".type held_call, @function\n"
    "held_call:\n"
    "    push %rbx\n"
    "    push %rbp\n"
    "    push %r12\n"
    "    push %r13\n"
    "    push %r14\n"
    "    push %r15\n"
    "    push %rsi\n"
    "    push %rdx\n"
    "    sub $8, %rsp\n"
    "    lea 1(%rsi), %rbx\n"
    "    lea 2(%rsi), %rbp\n"
    "    lea 3(%rsi), %r12\n"
    "    lea 4(%rsi), %r13\n"
    "    lea 5(%rsi), %r14\n"
    "    lea 6(%rsi), %r15\n"
    "    call PyObject_CallNoArgs@PLT\n"
    "    add $8, %rsp\n"
    "    pop %rdx\n"
    "    pop %rsi\n"
    "    mov %rax, (%rdx)\n"
    "    xor %eax, %eax\n"
    "    sub %rsi, %rbx\n"
    "    sub %rsi, %rbp\n"
    "    sub %rsi, %r12\n"
    "    sub %rsi, %r13\n"
    "    sub %rsi, %r14\n"
    "    sub %rsi, %r15\n"
    "    xor %ecx, %ecx\n"
    "    cmp $1, %rbx\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    cmp $2, %rbp\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    cmp $3, %r12\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    cmp $4, %r13\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    cmp $5, %r14\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    cmp $6, %r15\n"
    "    setne %cl\n"
    "    add %rcx, %rax\n"
    "    pop %r15\n"
    "    pop %r14\n"
    "    pop %r13\n"
    "    pop %r12\n"
    "    pop %rbp\n"
    "    pop %rbx\n"
    "    ret\n"
    ".size held_call, . - held_call\n");

/* Return how many callee-saved registers were wrong after `times` calls, -1 on an error, or -2 if this file has no code
   for the processor. */
long hold_registers(PyObject *callback, uint64_t seed, long times)
{
    long wrong = 0;
    for (long round = 0; round < times; round++) {
        PyObject *result;
        wrong += held_call(callback, seed << 8, &result);
        if (result == NULL) {
            return -1;
        }
        Py_DecRef(result);
    }
    return wrong;
}
#else
long hold_registers(PyObject *callback, uint64_t seed, long times)
{
    (void)callback, (void)seed, (void)times;
    return -2;
}
#endif
