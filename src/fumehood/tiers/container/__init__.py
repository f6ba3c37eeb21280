"""Tiers ``docker`` and ``podman``: one class told apart by one word, the engine.

Theory of operation. The supervisor talks to the engine's API on its Unix socket and to nothing else: it creates a
container with every door closed, attaches to its standard streams, starts it, and finds the guest agent at the other
end of that stream. The container's only process at first is ``python3 -c`` with a short constant bootstrap
(:mod:`.bootstrap`); the agent and all code come over the stream, so an image needs a Python and nothing of ours, no
host folder is mounted, and no command line holds code. The agent is PID 1 of the container: it reaps, and it ends with
the stream (``StdinOnce``), so a container does not outlive a supervisor that was killed; what is left of it then, a
stopped container, carries its owner's name and is removed by the next supervisor (:mod:`.owners`).

What holds the sandbox from outside is the engine's: namespaces, capabilities, seccomp (:mod:`.profile`), cgroup limits.
Where the container's first process is visible on this host, it is killed through its pidfd, which takes the whole PID
namespace with it at once, and its cgroup is read directly; the engine is told in any case. Where it is not (the engine
runs in a virtual machine), the engine's API is all there is, and the receipt says so.
"""
