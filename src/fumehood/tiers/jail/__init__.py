"""Tier ``jail``: the host's kernel, narrowed. No root, no daemon, no download.

Theory of operation::

    supervisor            the caller's process. Holds secrets, so it never forks without exec.
      │ control (SOCK_SEQPACKET)          launch by exec: empty environment, new session, no other descriptor
      ├── launcher        P0: makes the user and PID namespaces, forks P1, waits for it.
      │     └── zygote    P1: PID 1 of its namespace. Builds the root, becomes uid 0 of a user namespace that maps to no
      │           │       privileged host id, execs a Python inside the root, imports what is preloaded, loads the long
      │           │       seccomp filter. From then on it clones one child per sandbox and never runs anybody's code.
      │ channel   │
      └───────────┴── agent      PID 1 of the sandbox's own namespaces. Waits until the supervisor has put it into its
                        │        cgroup, seals itself (controls.py), reports, and serves frames (guest/agent.py).
                        └── interpreter    the program, under the same seal.

What each end of file means: the supervisor's end of *control* closes (it died, or is done) and the zygote exits, which
kills every sandbox, since their PID namespaces lie within its own; the supervisor's end of *channel* closes and that
agent exits, which kills its sandbox. Either suffices. The launcher's death kills the zygote by PR_SET_PDEATHSIG.

Where each module runs: ``tier.py client.py posture.py runtime.py`` in the supervisor; ``launcher.py`` in P0 and P1;
``zygote.py controls.py`` inside the root, copied there file by file.
"""
