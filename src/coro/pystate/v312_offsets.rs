//! Offsets in CPython 3.12: `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

offsets! {
    INTERP: usize = 16 => "void *" PyThreadState.interp;
    EVAL_BREAKER: Option<usize> = None;
    RECURSION_REMAINING: usize = 28 => "int" PyThreadState.py_recursion_remaining;
    RECURSION_LIMIT: usize = 32 => "int" PyThreadState.py_recursion_limit;
    RECURSION_HEADROOM: usize = 40 => "int" PyThreadState.recursion_headroom;
    TRACING: usize = 44 => "int" PyThreadState.tracing;
    WHAT_EVENT: usize = 48 => "int" PyThreadState.what_event;
    FRAME: usize = 56 => "void *" PyThreadState.cframe;
    PROFILE_FUNCTION: usize = 64 => "void *" PyThreadState.c_profilefunc;
    PROFILE_OBJECT: usize = 80 => "void *" PyThreadState.c_profileobj;
    CURRENT_EXCEPTION: usize = 96 => "void *" PyThreadState.current_exception;
    EXC_INFO: usize = 104 => "void *" PyThreadState.exc_info;
    THREAD_ID: usize = 136 => "unsigned long" PyThreadState.thread_id;
    CONTEXT: usize = 208 => "void *" PyThreadState.context;
    CONTEXT_VER: usize = 216 => "uint64_t" PyThreadState.context_ver;
    DATASTACK_CHUNK: usize = 232 => "void *" PyThreadState.datastack_chunk;
    DATASTACK_TOP: usize = 240 => "void *" PyThreadState.datastack_top;
    DATASTACK_LIMIT: usize = 248 => "void *" PyThreadState.datastack_limit;
    EXC_STATE: usize = 256 => "_PyErr_StackItem" PyThreadState.exc_state;
    C_RECURSION_REMAINING: Option<usize> = Some(36) => "int" PyThreadState.c_recursion_remaining;
    TRASH_NESTING: Option<usize> = Some(152) => "int" PyThreadState.trash.delete_nesting;
    EXECUTOR: Option<usize> = None;
    FRAME_PREVIOUS: usize = 8 => "void *" _PyInterpreterFrame.previous;
    CODE_VERSION: Option<usize> = Some(160) => "uint64_t" PyCodeObject._co_instrumentation_version;
    CODE_FLAGS: usize = 48 => "int" PyCodeObject.co_flags;
    // The field follows the object header and `f_back`.
    F_FRAME: usize = 24 => "void *" PyFrameObject.f_frame;
    CFRAME_LEN: usize = 16 => sizeof(_PyCFrame);
    CURRENT_FRAME: usize = 0 => "void *" _PyCFrame.current_frame;
    // asyncio keeps the running task in a dict instead (`coro/tasks.rs`), and the running loop outside of this
    // structure.
    RUNNING_TASK: Option<usize> = None;
    RUNNING_LOOP: Option<usize> = None;
}
