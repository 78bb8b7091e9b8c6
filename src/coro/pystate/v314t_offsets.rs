//! Offsets in CPython 3.14: `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_interpframe_structs.h`), for 64-bit free-threaded builds.

offsets! {
    INTERP: usize = 16 => "void *" PyThreadState.interp;
    EVAL_BREAKER: Option<usize> = None;
    RECURSION_REMAINING: usize = 48 => "int" PyThreadState.py_recursion_remaining;
    RECURSION_LIMIT: usize = 52 => "int" PyThreadState.py_recursion_limit;
    RECURSION_HEADROOM: usize = 56 => "int" PyThreadState.recursion_headroom;
    TRACING: usize = 60 => "int" PyThreadState.tracing;
    WHAT_EVENT: usize = 64 => "int" PyThreadState.what_event;
    FRAME: usize = 72 => "void *" PyThreadState.current_frame;
    PROFILE_FUNCTION: usize = 80 => "void *" PyThreadState.c_profilefunc;
    PROFILE_OBJECT: usize = 96 => "void *" PyThreadState.c_profileobj;
    CURRENT_EXCEPTION: usize = 112 => "void *" PyThreadState.current_exception;
    EXC_INFO: usize = 120 => "void *" PyThreadState.exc_info;
    THREAD_ID: usize = 152 => "unsigned long" PyThreadState.thread_id;
    CONTEXT: usize = 208 => "void *" PyThreadState.context;
    CONTEXT_VER: usize = 216 => "uint64_t" PyThreadState.context_ver;
    DATASTACK_CHUNK: usize = 232 => "void *" PyThreadState.datastack_chunk;
    DATASTACK_TOP: usize = 240 => "void *" PyThreadState.datastack_top;
    DATASTACK_LIMIT: usize = 248 => "void *" PyThreadState.datastack_limit;
    EXC_STATE: usize = 256 => "_PyErr_StackItem" PyThreadState.exc_state;
    C_RECURSION_REMAINING: Option<usize> = None;
    TRASH_NESTING: Option<usize> = None;
    EXECUTOR: Option<usize> = Some(272) => "void *" PyThreadState.current_executor;
    FRAME_PREVIOUS: usize = 8 => "void *" _PyInterpreterFrame.previous;
    CODE_VERSION: Option<usize> = Some(184) => "uintptr_t" PyCodeObject._co_instrumentation_version;
    CODE_FLAGS: usize = 64 => "int" PyCodeObject.co_flags;
    // The field follows the object header and `f_back`.
    F_FRAME: usize = 40 => "void *" PyFrameObject.f_frame;
    // `Include/internal/pycore_tstate.h`
    RUNNING_LOOP: Option<usize> = Some(864) => "void *" _PyThreadStateImpl.asyncio_running_loop;
    RUNNING_TASK: Option<usize> = Some(872) => "void *" _PyThreadStateImpl.asyncio_running_task;
    // The fields that `free_threaded.rs` needs.
    CRITICAL_SECTION: usize = 176 => "uintptr_t" PyThreadState.critical_section;
    STACK_REFS: usize = 920 => "void *" _PyThreadStateImpl.c_stack_refs;
    STACK_REF: usize = 0 => "uintptr_t" _PyCStackRef.ref;
    STACK_REF_NEXT: usize = 8 => "void *" _PyCStackRef.next;
    FRAME_EXECUTABLE: usize = 0 => "uintptr_t" _PyInterpreterFrame.f_executable;
    FRAME_FUNCTION: usize = 16 => "uintptr_t" _PyInterpreterFrame.f_funcobj;
    FRAME_STACK_POINTER: usize = 64 => "void *" _PyInterpreterFrame.stackpointer;
    FRAME_OWNER: usize = 78 => "char" _PyInterpreterFrame.owner;
    FRAME_LOCALS: usize = 80 => "uintptr_t" _PyInterpreterFrame.localsplus;
}
