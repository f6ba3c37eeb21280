"""Tier ``gvisor``: runsc driven directly, without a daemon, around a root file system from the image store.

Theory of operation::

    supervisor ── control (SEQPACKET) ── launcher (P0, one for all sandboxes: waits, tells what was used)
        │                                   └ clone3: P1, PID 1 of its own PID and mount namespaces
        └═ channel (frames) ══════════════════ P1 waits for a word, mounts the scratch, becomes `runsc run`
                                                   ├ gofer      (opens files for the sandbox)
                                                   ├ a hook     (made ahead of a call, it waits: :mod:`.beginning`)
                                                   └ sandbox    (the Sentry: a kernel in user space)
                                                        └ python3 -c bootstrap → the guest agent

The channel is a socket that runsc hands on as the standard input and output of the container. P1 goes into a cgroup of
ours before it starts anything, so memory, CPU and pids of gofer, Sentry and guest are held together from outside; and
since P1 is PID 1, killing it kills all of them, whatever runsc does.

What is writable inside (/work, /tmp, /dev/shm) is one sized tmpfs that P1 mounts in its own mount namespace and runsc
binds in: the host counts its bytes and files, and the supervisor keeps a descriptor of the work folder that outlives
the sandbox. P1 sends that descriptor with its report.

A plain `runsc run` of the same bundle is what a sandbox's start is measured against. What the agent imports is sent
along with it (:mod:`.library`), and Python is started without looking for what is known (:mod:`.python`), since under
gVisor every file that it opens costs milliseconds.

An ordinary user is root of a new user namespace first, and runsc runs as it does for root, without its cgroups and
without a network either way.
"""
