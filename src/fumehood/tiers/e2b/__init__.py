"""Tier ``e2b``: a Firecracker microVM of the managed service E2B, through the vendor's SDK.

The program, its files and its output leave this host. What holds it there is the provider's claim, and the receipt
marks it so. The API key stays in this process: it goes to the control API and nowhere else, and is in no error, log or
repr of ours. What the service cannot hold of a policy is refused by name.

A run is a process of its own (``commands``), so that its exit code is the kernel's; an exec in a live sandbox is a cell
of the service's interpreter, so that its state lasts. Every sandbox is made with a life of its own at the service, so
that one which we cannot destroy any more, because we crashed, ends by itself.
"""
