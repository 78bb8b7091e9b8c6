// The body of `start`; see aarch64.rs.
// x19 = entry, x20 = its argument
    .cfi_startproc
    .cfi_undefined x30
    mov x29, xzr
    mov x30, xzr
    mov x0, x20
    blr x19
    brk #1
    .cfi_endproc
