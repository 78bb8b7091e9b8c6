//! Offsets in CPython 3.11: `struct _ts` (`Include/cpython/pystate.h`) and `struct _PyInterpreterFrame`
//! (`Include/internal/pycore_frame.h`), for 64-bit builds with the GIL.

offsets! {
    INTERP: usize = 16 => "void *" PyThreadState.interp;
    EVAL_BREAKER: Option<usize> = None;
    RECURSION_REMAINING: usize = 32 => "int" PyThreadState.recursion_remaining;
    RECURSION_LIMIT: usize = 36 => "int" PyThreadState.recursion_limit;
    RECURSION_HEADROOM: usize = 40 => "int" PyThreadState.recursion_headroom;
    TRACING: usize = 44 => "int" PyThreadState.tracing;
    WHAT_EVENT: usize = 48 => "int" PyThreadState.tracing_what;
    FRAME: usize = 56 => "void *" PyThreadState.cframe;
    PROFILE_FUNCTION: usize = 64 => "void *" PyThreadState.c_profilefunc;
    TRACE_FUNCTION: usize = 72 => "void *" PyThreadState.c_tracefunc;
    PROFILE_OBJECT: usize = 80 => "void *" PyThreadState.c_profileobj;
    CURRENT_EXCEPTION: usize = 96 => "void *" PyThreadState.curexc_type;
    EXC_INFO: usize = 120 => "void *" PyThreadState.exc_info;
    THREAD_ID: usize = 152 => "unsigned long" PyThreadState.thread_id;
    CONTEXT: usize = 224 => "void *" PyThreadState.context;
    CONTEXT_VER: usize = 232 => "uint64_t" PyThreadState.context_ver;
    DATASTACK_CHUNK: usize = 296 => "void *" PyThreadState.datastack_chunk;
    DATASTACK_TOP: usize = 304 => "void *" PyThreadState.datastack_top;
    DATASTACK_LIMIT: usize = 312 => "void *" PyThreadState.datastack_limit;
    EXC_STATE: usize = 320 => "_PyErr_StackItem" PyThreadState.exc_state;
    C_RECURSION_REMAINING: Option<usize> = None;
    TRASH_NESTING: Option<usize> = Some(168) => "int" PyThreadState.trash_delete_nesting;
    EXECUTOR: Option<usize> = None;
    FRAME_PREVIOUS: usize = 48 => "void *" _PyInterpreterFrame.previous;
    CODE_VERSION: Option<usize> = None;
    CODE_FLAGS: usize = 48 => "int" PyCodeObject.co_flags;
    // The field follows the object header and `f_back`.
    F_FRAME: usize = 24 => "void *" PyFrameObject.f_frame;
    USE_TRACING: usize = 0 => "uint8_t" _PyCFrame.use_tracing;
    CFRAME_LEN: usize = 24 => sizeof(_PyCFrame);
    CURRENT_FRAME: usize = 8 => "void *" _PyCFrame.current_frame;
    // asyncio keeps the running task in a dict instead (`coro/tasks.rs`), and the running loop outside of this
    // structure.
    RUNNING_TASK: Option<usize> = None;
    RUNNING_LOOP: Option<usize> = None;
}
