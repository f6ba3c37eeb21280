"""An endpoint that speaks E2B's protocol and runs programs in Fumehood's sandboxes: the beginning of one.

E2B's SDK (PyPI ``e2b``, ``e2b-code-interpreter``) speaks to three services, and this server is all of them on one
loopback port, told apart by path and by the header ``E2b-Sandbox-Port``:

=============  =====  ==========================================================================================
control API    -      make, list, look at, prolong and kill sandboxes; needs the API key (``control.py``)
envd           49983  processes and the file tree by Connect RPC, file contents by HTTP (``envd.py``)
interpreter    49999  code in a state that lasts, streamed as JSON lines (``interpreter.py``)
=============  =====  ==========================================================================================

Each E2B sandbox is one live sandbox of a :class:`fumehood.runner.AsyncRunner` (``sandboxes.py``), whose tier and policy
the operator chooses; its work folder appears as /home/user. It serves what the SDK's parts for sandboxes, commands,
files and code use; pseudo-terminals, watching folders, snapshots, volumes and templates answer "unimplemented". One
command or one piece of code runs at a time in a sandbox; a second waits.

The messages are the SDK's own generated classes, so ``pip install fumehood[e2b]`` is needed. Only loopback: there is
no TLS, and the key crosses the wire as it is.
"""
