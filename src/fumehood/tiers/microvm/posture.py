"""The receipt of a machine: what its kernel said before any program ran, and what the jail around QEMU holds."""

from __future__ import annotations

import resource
from dataclasses import replace

from fumehood.errors import StartError
from fumehood.model import Boundary, Control, Held, MiB, Policy, Receipt
from fumehood.tiers.microvm.template import Template
from fumehood.wire import Header

TERMINALS_MAX = 64  # as in guest_init.py, which is not loaded here
_PAGE = resource.getpagesize()
_EMULATED = "QEMU without KVM: its authors promise no isolation for emulation, so what holds is the jail around it"
_SHARED = "clones of one template share the address layout and hash seed of its interpreter"

#: Controls of the jail that the supervisor keeps for the sandbox as a whole; the rest of them are QEMU's own.
_OF_THE_WHOLE = ("cpu", "cpu_time", "wall", "output")


def receipt(answer: Header, policy: Policy, template: Template, monitor: Receipt) -> Receipt:
    """Compare what init read back with what was asked. Raises StartError naming every wrong value."""
    if answer.get("op") != "adopted":
        raise StartError(f"the guest could not adopt its limits: {str(answer.get('message'))[-500:]}", tier="microvm")
    limits = policy.limits
    size = template.recipe.shape.memory_bytes // MiB
    controls: list[Control] = []
    wrong: list[str] = []

    def take(name: str, good: bool, value: object, mechanism: str) -> None:
        if not good:
            wrong.append(f"{name} is {value!s:.100}")
        controls.append(Control(name, Held.HARD, mechanism, str(value)[:200]))

    memory, pids, disk, inodes = (answer.get(name) for name in ("memory_bytes", "pids", "disk_bytes", "inodes"))
    inside = "of the guest's kernel"
    take("memory", memory == limits.memory_bytes // _PAGE * _PAGE, memory, f"memory.max {inside}; {size} MiB in all")
    take("pids", pids == limits.pids + 1, limits.pids, f"pids.max {inside}")
    take("disk", disk == -(-limits.disk_bytes // _PAGE) * _PAGE, disk, f"tmpfs size= {inside}")
    take("files", inodes == limits.files + 4, inodes, f"tmpfs nr_inodes= {inside}")
    terminals = answer.get("terminals")
    wanted = f"max={TERMINALS_MAX}" if policy.terminals else "none"
    take("terminals", terminals == wanted, terminals, f"devpts newinstance, max= {inside}")
    take("rlimits", isinstance(answer.get("rlimits"), dict), answer.get("rlimits"), f"setrlimit(2) {inside}")
    take("entropy", True, "48 bytes of the host's", "RNDADDENTROPY and RNDRESEEDCRNG before the first program")
    take("clock", True, "the host's", "clock_settime(2) before the first program")
    take("network", True, "no device", "the machine has none")
    take("descriptors", True, "three sockets, memory file, device state", "execve(2) with nothing else open")
    for control in monitor.controls:
        if control.name in _OF_THE_WHOLE:
            controls.append(_of_policy(control, policy))
        else:
            controls.append(replace(control, name=f"monitor_{control.name}"))
    if wrong:
        raise StartError(f"not held as asked: {'; '.join(wrong)}", tier="microvm")
    hardware = template.recipe.shape.accelerator == "kvm"
    return Receipt(
        "microvm",
        Boundary.HARDWARE if hardware else Boundary.EMULATED,
        tuple(controls),
        host=f"QEMU {template.recipe.program.version} ({template.recipe.shape.accelerator}) on {monitor.host}; "
        f"guest Linux {template.recipe.image.kernel_release}",
        notes=(_SHARED,) if hardware else (_EMULATED, _SHARED),
    )


def _of_policy(control: Control, policy: Policy) -> Control:
    """A control as the policy has it, where QEMU was given some room beside."""
    if control.name == "cpu_time":
        return replace(control, value=str(policy.limits.cpu_s))
    if control.name == "output":
        return Control("output", Held.HARD, f"bounded reader, {policy.overflow}", str(policy.limits.output_bytes))
    return control
