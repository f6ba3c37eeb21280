"""Tier ``interpreter``: a subset of Python in Monty (pydantic-monty), an interpreter without I/O.

What holds a program is that its language has nothing to reach the host with: no files, no network, no processes, no
modules but Monty's own, only what the host hands in as ``tools``. That is a language runtime, not a hardware or kernel
boundary: a bug in the interpreter's memory safety would break it. So the interpreter runs in a process of its own,
started by a worker of ours (:mod:`fumehood.tiers.worker`) inside the jail where the host has one.

``tier.py`` and ``recipe`` run in the supervisor; ``worker.py`` and ``unsupported.py`` in the jail.
"""
