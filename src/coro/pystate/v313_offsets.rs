//! Offsets in CPython 3.13: `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

offsets! {
    INTERP: usize = 16 => "void *" PyThreadState.interp;
    EVAL_BREAKER: Option<usize> = None;
    RECURSION_REMAINING: usize = 44 => "int" PyThreadState.py_recursion_remaining;
    RECURSION_LIMIT: usize = 48 => "int" PyThreadState.py_recursion_limit;
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
    C_RECURSION_REMAINING: Option<usize> = Some(52) => "int" PyThreadState.c_recursion_remaining;
    TRASH_NESTING: Option<usize> = None;
    EXECUTOR: Option<usize> = Some(272) => "void *" PyThreadState.previous_executor;
    FRAME_PREVIOUS: usize = 8 => "void *" _PyInterpreterFrame.previous;
    CODE_VERSION: Option<usize> = Some(168) => "uintptr_t" PyCodeObject._co_instrumentation_version;
    CODE_FLAGS: usize = 48 => "int" PyCodeObject.co_flags;
    // The field follows the object header and `f_back`.
    F_FRAME: usize = 24 => "void *" PyFrameObject.f_frame;
    // asyncio keeps the running task in a dict instead (`coro/tasks.rs`), and the running loop outside of this
    // structure.
    RUNNING_TASK: Option<usize> = None;
    RUNNING_LOOP: Option<usize> = None;
}
