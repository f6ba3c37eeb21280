"""Tier ``subprocess``: a child process with limits. Not a boundary.

Theory of operation. For each sandbox the supervisor execs a launcher (P0) with an empty environment. P0 clones P1 into
a PID namespace, so that one signal ends the whole tree; a network namespace, so that nothing is reached; an IPC
namespace; and, where an ordinary user started it, the user namespace that these need. P1 takes its limits, becomes an
unprivileged host user if root started it, gives up every capability, and serves as the guest agent. The host's files
stay visible to the program as they are to that user: this is what makes the tier weak, and why the boundary is called
``limits``. When the supervisor is killed, P0 kills P1 and removes the work folder.
"""
