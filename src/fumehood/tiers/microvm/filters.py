"""The seccomp filters of the machine monitor: the jail's, with what QEMU needs to put its own filter on top.

QEMU's ``-sandbox on`` loads a filter through libseccomp, which sets no_new_privs (it is set already) and calls
seccomp(2). A further filter can only take away.
"""

from __future__ import annotations

from fumehood.linux import seccomp

_PR_SET_NO_NEW_PRIVS = 38
_KVMIO = 0xAE  # <linux/kvm.h>; of no use to who cannot open /dev/kvm


def allow_list() -> bytes:
    """The long filter, as :func:`fumehood.linux.seccomp.allow_list` has it, and the requests of KVM's descriptors."""
    return seccomp.allow_list(ioctl_types=(_KVMIO,))


def seal() -> bytes:
    """The short filter. Raises OSError like :func:`fumehood.linux.seccomp.seal`."""
    return seccomp.seal(keep=("seccomp",), prctl_options=(seccomp.PR_GET_NO_NEW_PRIVS, _PR_SET_NO_NEW_PRIVS))


def describe() -> str:
    """One line for a receipt."""
    return f"{seccomp.describe()}; and QEMU's own filter on top"
