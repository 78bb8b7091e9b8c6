//! Offsets that are the same in all supported versions of CPython.

offsets! {
    PREVIOUS_ITEM: usize = 8 => "void *" _PyErr_StackItem.previous_item;
    EXC_INFO_LEN: usize = 16 => sizeof(_PyErr_StackItem);
    CHUNK_PREVIOUS: usize = 0 => "void *" _PyStackChunk.previous;
    CHUNK_SIZE: usize = 8 => "size_t" _PyStackChunk.size;
    CHUNK_TOP: usize = 16 => "size_t" _PyStackChunk.top;
    CHUNK_DATA: usize = 24 => "void *" _PyStackChunk.data;
}
