"""All that is about QEMU: where it is, what it needs to see, its command lines, and its monitor protocol.

The machine is ``microvm`` (https://www.qemu.org/docs/master/system/i386/microvm.html): no PCI, no firmware to speak
of, one virtio-serial device with two ports. Facts of QEMU that the lines below rest on, with QEMU 7.2:

- a memory file is opened for writing even with ``share=off``: a sealed memfd refuses the write, not the open;
- ``x-ignore-shared`` keeps the memory file out of the saved state, so that a clone maps it where the template had it;
- a template that was stopped before it was saved comes up stopped, so it is saved running;
- without ``tb-size`` the buffer for translated code may grow to 1 GiB;
- without a real-time clock Linux looks for one for five seconds;
- a guest without a PM timer or HPET must be told the frequency of the TSC or it waits for ever (``tsc_early_khz``);
- Debian's kernel has no command-line interface to virtio-mmio, so the devices are described by ACPI.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fumehood.errors import StartError, UnavailableError
from fumehood.model import MiB

PROGRAM = "qemu-system-x86_64"
INSTALL = "apt-get install --no-install-recommends qemu-system-x86"
KVM = "/dev/kvm"
FIRMWARE = "bios-microvm.bin"

#: Descriptors in QEMU; the monitor's is the jail's channel.
MONITOR_FD = 3
AGENT_FD, CONTROL_FD, MEMORY_FD, STATE_FD, KERNEL_FD, INITRAMFS_FD = range(10, 16)

#: What QEMU takes beside the guest's memory: its own heap and libraries, and the translated code. Measured: 46 MiB.
CODE_BUFFER_BYTES = 64 * MiB
OVERHEAD_BYTES = 128 * MiB + CODE_BUFFER_BYTES
THREADS = 16

_SAID_MAX = 4 << 10
_LINE_MAX = 64 << 10
_CAPABILITIES = {"capabilities": [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]}
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
#: No console; no side-channel mitigations inside (one tenant per machine: the host's own stand between machines); a
#: panic ends the machine, by a triple fault, since there is no keyboard controller to reset it.
_KERNEL_OPTIONS = (
    "console=null quiet panic=-1 reboot=t tsc=reliable no_timer_check mitigations=off audit=0 "
    "random.trust_cpu=on cryptomgr.notests apparmor=0 transparent_hugepage=never rcupdate.rcu_expedited=1"
)
#: Emulated, a string instruction takes a step for each byte where it is said to be fast (erms, fsrm), each entry and
#: exit of user memory ends a block of translated code (smap), wide vectors are slower than narrow ones, and memory is
#: fresh from the template anyway.
_EMULATED_CPU = "max,-erms,-fsrm,-smap,-avx,-avx2,-f16c,-fma,-la57"
_EMULATED_OPTIONS = "init_on_alloc=0 psi=0 lsm= noautogroup nowatchdog"


@dataclass(frozen=True, slots=True)
class Program:
    """A QEMU on this host: its path, version, and every file that it opens by name."""

    path: str
    version: str
    files: tuple[tuple[str, str], ...]  # (host path, path that it looks for)


@dataclass(frozen=True, slots=True)
class Shape:
    """The machine; a clone's must equal its template's."""

    accelerator: str  # "tcg" or "kvm"
    memory_bytes: int

    @property
    def cpu(self) -> str:
        """The CPU model: the host's, or what the emulator is quickest at."""
        return "host" if self.accelerator == "kvm" else _EMULATED_CPU

    def arguments(self, program: Program, *, shared: bool) -> list[str]:
        """What template and clone have in common. ``shared``: what the guest writes reaches the memory file."""
        tcg = f",thread=single,tb-size={CODE_BUFFER_BYTES // MiB}" if self.accelerator == "tcg" else ""
        size = self.memory_bytes // MiB
        arguments = [program.path, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        arguments += ["-name", "sandbox", "-accel", self.accelerator + tcg, "-cpu", self.cpu, "-smp", "1"]
        arguments += ["-m", f"{size}M", "-object"]
        backend = f"memory-backend-file,id=ram,size={size}M,mem-path=/proc/self/fd/{MEMORY_FD}"
        arguments += [f"{backend},share={'on' if shared else 'off'}", "-M"]
        machine = "microvm,x-option-roms=off,isa-serial=off,rtc=on,pit=on,pic=on,acpi=on,auto-kernel-cmdline=off"
        arguments += [f"{machine},memory-backend=ram", "-device", "virtio-serial-device,id=serial,max_ports=3"]
        for number, (name, fd) in enumerate((("agent", AGENT_FD), ("control", CONTROL_FD)), 1):
            arguments += ["-chardev", f"socket,id={name},fd={fd}"]
            arguments += ["-device", f"virtserialport,bus=serial.0,nr={number},chardev={name},name={name}"]
        arguments += ["-chardev", f"socket,id=monitor,fd={MONITOR_FD}", "-mon", "chardev=monitor,mode=control"]
        return [*arguments, "-sandbox", _SANDBOX]

    def template_arguments(self, program: Program, options: str) -> list[str]:
        """For the machine that boots; ``options`` go to the guest's init on the kernel's command line."""
        timing = f" {_EMULATED_OPTIONS} tsc_early_khz={tsc_khz()}" if self.accelerator == "tcg" else ""
        files = ["-kernel", f"/proc/self/fd/{KERNEL_FD}", "-initrd", f"/proc/self/fd/{INITRAMFS_FD}"]
        return [
            *self.arguments(program, shared=True),
            *files,
            "-append",
            f"{_KERNEL_OPTIONS}{timing} {options}".strip(),
        ]

    def clone_arguments(self, program: Program) -> list[str]:
        """For a machine that waits to be given the template's state."""
        return [*self.arguments(program, shared=False), "-incoming", "defer"]


@lru_cache(maxsize=1)
def find() -> Program:
    """The QEMU of this host. Raises UnavailableError with the command that installs what is missing."""
    path = shutil.which(PROGRAM, path="/usr/bin:/usr/local/bin:/usr/libexec:/bin")
    if path is None:
        raise UnavailableError(f"{PROGRAM} is not installed", tier="microvm", remedy=INSTALL)
    version = re.search(r"version (\S+)", _output([path, "--version"]))
    if version is None:
        raise UnavailableError(f"{path} does not tell its version", tier="microvm", remedy=INSTALL)
    files = [(os.path.realpath(path), path), *_libraries(path)]
    prefix = os.path.dirname(os.path.dirname(path))
    firmware = [f"{prefix}/share/{folder}/{FIRMWARE}" for folder in ("qemu", "seabios", "qemu-kvm")]
    firmware = [name for name in firmware if os.path.exists(name)]
    if not firmware:
        raise UnavailableError(f"the firmware {FIRMWARE} is missing", tier="microvm", remedy=INSTALL)
    files.append((os.path.realpath(firmware[0]), firmware[0]))
    for folder in (f"{prefix}/lib/x86_64-linux-gnu/qemu", f"{prefix}/lib64/qemu", f"{prefix}/lib/qemu"):
        module = f"{folder}/accel-tcg-x86_64.so"
        if os.path.exists(module):  # where TCG is a module; elsewhere it is built in
            files += [(os.path.realpath(module), module), *_libraries(module)]
    return Program(path, version[1], tuple(dict.fromkeys(files)))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]} does not run: {error}", tier="microvm", remedy=INSTALL) from None


def _libraries(path: str) -> list[tuple[str, str]]:
    """What the loader would load for ``path``, and the loader."""
    names = re.findall(r"^\s*(?:\S+ => )?(/\S+) \(0x", _output(["ldd", path]), re.MULTILINE)
    return [(os.path.realpath(name), name) for name in names]


@lru_cache(maxsize=1)
def tsc_khz() -> int:
    """The frequency of this host's time-stamp counter, in kHz: the median of five measurements of 20 ms each.

    TCG hands the host's counter to the guest, and no file tells its frequency to an ordinary user.
    """
    code = bytes.fromhex("0f3148c1e2204809d0c3")  # rdtsc; shl rdx,32; or rax,rdx; ret
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(code)
        view = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(view))
        found = []
        for _ in range(5):
            began, first = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW), read()
            time.sleep(0.02)
            ended, last = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW), read()
            found.append((last - first) / (ended - began) * 1e6)
        del read, view
    middle: float = sorted(found)[2]
    return round(middle)


class Monitor:
    """QEMU's monitor protocol on a socket that it owns. QEMU may be in a guest's hand: every line is bounded."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._data = b""
        self._said = ""
        self._closed = False
        end.setblocking(False)

    @property
    def said(self) -> str:
        """What came over the socket that is no answer: QEMU's last words."""
        return self._said

    def post(self, command: str, **arguments: object) -> None:
        """Send a command without waiting for its answer. Raises OSError."""
        message: dict[str, object] = {"execute": command}
        if arguments:
            message["arguments"] = arguments
        self._end.sendall(json.dumps(message).encode() + b"\n")

    async def call(self, command: str, **arguments: object) -> Any:
        """Send a command and wait for its answer. Raises StartError, TimeoutError by the caller's own timeout."""
        try:
            self.post(command, **arguments)
        except OSError as error:
            raise StartError(f"QEMU is gone: {error}; {self._said}".rstrip("; "), tier="microvm") from None
        while True:
            message = await self.next()
            if "return" in message:
                return message["return"]

    async def restore(self, state_fd: int) -> None:
        """Load the template's state and go on running. Raises StartError."""
        try:
            self.post("qmp_capabilities")
            self.post("migrate-set-capabilities", **_CAPABILITIES)
            self.post("migrate-incoming", uri=f"fd:{state_fd}")
        except OSError as error:
            raise StartError(f"QEMU is gone: {error}", tier="microvm") from None
        await self._migrated()

    async def save(self, stream: socket.socket) -> None:
        """Write this machine's state to ``stream``, a socket of ours. Raises StartError."""
        await self.call("qmp_capabilities")
        await self.call("migrate-set-capabilities", **_CAPABILITIES)
        await self.call("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stream.fileno()]))]
            self._end.sendmsg([b'{"execute": "getfd", "arguments": {"fdname": "state"}}\n'], rights)
            self.post("migrate", uri="fd:state")
        except OSError as error:
            raise StartError(f"QEMU is gone: {error}", tier="microvm") from None
        await self._migrated()

    async def _migrated(self) -> None:
        while True:
            message = await self.next()
            if message.get("event") == "MIGRATION":
                status = message.get("data", {}).get("status")
                if status == "completed":
                    return
                if status == "failed":
                    facts = await self.call("query-migrate")
                    reason = str(facts.get("error-desc") if isinstance(facts, dict) else "")[:500] or self._said
                    raise StartError(f"QEMU could not load or save the machine: {reason}", tier="microvm")

    async def ended(self) -> None:
        """Never returns. Raises StartError when QEMU ends, with its last words."""
        while True:
            await self.next()

    async def next(self) -> dict[str, Any]:
        """The next message. Raises StartError: QEMU is gone, refuses a command, or is out of bounds."""
        while True:
            line, found, rest = self._data.partition(b"\n")
            if not found:
                await self._receive()
                continue
            self._data = rest
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                self._said = (self._said + line.decode("utf-8", "replace"))[-_SAID_MAX:]
                continue
            if not isinstance(message, dict):
                raise StartError("QEMU sent what is no message", tier="microvm")
            if "error" in message:
                raise StartError(f"QEMU refused: {str(message['error'])[:500]}", tier="microvm")
            return message

    async def _receive(self) -> None:
        if len(self._data) > _LINE_MAX:
            raise StartError("QEMU sent an endless line", tier="microvm")
        try:
            piece = await self._loop.sock_recv(self._end, _LINE_MAX)
        except OSError as error:
            piece = b""
            self._said += str(error)
        if not piece:
            self._said = (self._said + self._data.decode("utf-8", "replace"))[-_SAID_MAX:]
            raise StartError(f"QEMU ended: {self._said or 'it said nothing'}", tier="microvm")
        self._data += piece

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._end.close()
