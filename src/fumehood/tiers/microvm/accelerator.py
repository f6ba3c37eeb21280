"""Which accelerator QEMU runs with here: KVM where a guest was seen to boot with it, or else TCG, its emulation."""

from __future__ import annotations


def chosen() -> str:
    """ "kvm" or "tcg"."""
    return "tcg"


def verdict() -> str:
    """What is known of KVM here, for ``fumehood doctor``."""
    return "not tried"
