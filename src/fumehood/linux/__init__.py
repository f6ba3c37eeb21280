"""The kernel in Python: one module per facility, one thin function per system call. Nothing here knows a sandbox."""
