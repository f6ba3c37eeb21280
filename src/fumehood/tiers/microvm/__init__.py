"""Tier ``microvm``: a kernel of its own for every sandbox, restored copy-on-write from a template.

Theory of operation::

    supervisor
      │ control                  the jail's zygote (fumehood.tiers.jail), with a root that shows QEMU and its libraries
      │   └── zygote
      │ monitor socket (QMP)
      ├──────┼── QEMU            one per sandbox: a child of the zygote that sealed itself and then executed QEMU, with
      │ frames     ║             nothing but the descriptors sent to it: memory file, device state, three sockets
      ├────────────╫── agent     guest/agent.py, PID 1 of a PID namespace inside the guest, uid 1000, no capability
      │ lines      ║     └── interpreter    forked before the snapshot, waits for the program
      └────────────╨── init      PID 1 of the guest (guest_init.py)

A *template* is one machine that booted, imported what the policy preloads, forked its interpreter and rehearsed a run.
Its memory lies in a memory file, sealed so that no clone can alter it, and its device state beside it. A *clone* maps
the memory privately: it pays for the pages that it writes. Two clones are alike to the last bit, so before a byte of a
program goes in, the guest's init is given fresh entropy, the host's clock and the sandbox's limits, and answers with
what its kernel then holds; only after that does the agent say "ready".

Who trusts whom. Until then the guest has run nobody's code and what it says is read back into the receipt. From then
on all it says is hostile: frames and lines are bounded, and the deadline, CPU time and output are judged outside. What
init reports of memory is believed in one thing, whether a killed program was killed for memory.

The end. ``kill()`` stops QEMU with SIGSTOP, which no guest can see or avoid; the kernel of the host enforces it. So
the work folder, which is inside the guest, can still be had: for artifacts the machine is let go on with one order,
upon which init kills the programs and sends the folder. Then QEMU is killed, and with it all there was.

Where each module runs: ``monitor.py filters.py`` in the jail, ``guest_init.py guest_files.py`` in the guest, the rest
in the supervisor. All that is about QEMU stands in ``qemu.py``.
"""
