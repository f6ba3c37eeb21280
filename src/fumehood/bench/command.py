"""The plain command of a container tier: what somebody types who wants one program run in such a container.

It asks for all that the tier asks for, as far as its flags go, and the program is ``print(1)`` in the same image.
Whoever waits for it waits for the same as the tier's caller: the program's output, and nothing left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fumehood.errors import UnavailableError
from fumehood.images import store
from fumehood.images.engine import Word
from fumehood.images.service import reach
from fumehood.linux import cgroup
from fumehood.model import Policy
from fumehood.threads import in_thread
from fumehood.tier import Tier
from fumehood.tiers.container import owners, spec
from fumehood.tiers.container.tier import Host, learn
from fumehood.tiers.gvisor import bundle, runsc
from fumehood.tiers.gvisor.beginning import overhead_tasks

PYTHON = ("python3", "-I", "-c", "print(1)")
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class PlainCommand:
    """``arguments`` end in a program that prints 1; NAME in them stands for a name that is new each time."""

    title: str
    arguments: tuple[str, ...]
    note: str = ""  # what it cannot be asked for
    entries: tuple[int, ...] = ()  # the ways into the control group that it runs in
    count: int = 0

    def once(self) -> float:
        """Run it to its end; the seconds that took. Raises RuntimeError with what it said."""
        self.count += 1
        arguments = [argument.replace("NAME", f"fumehood-bench-{self.count}") for argument in self.arguments]
        if self.entries:
            into = "".join(f"echo 0 >/proc/self/fd/{entry}; " for entry in self.entries)
            arguments = ["/bin/sh", "-c", f'{into}exec "$@"', "sh", *arguments]
        began = time.perf_counter()
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            pass_fds=self.entries,
        )
        seconds = time.perf_counter() - began
        if done.stdout != "1\n":
            raise RuntimeError(f"{self.title} failed: {done.stderr[-500:]}")
        return seconds


@contextlib.asynccontextmanager
async def plain_command(tier: Tier) -> AsyncIterator[PlainCommand | None]:
    """The command to hold ``tier`` against, None if there is none for it.

    Raises UnavailableError where the tier has one and this host does not.
    """
    name = tier.name
    if name in ("docker", "podman"):
        with tempfile.NamedTemporaryFile("w", prefix="fumehood-bench-", suffix=".json") as profile:
            profile.write(spec.seccomp_text())
            profile.flush()
            yield await _of_engine(cast(Word, name), profile.name)
    elif name == "gvisor":
        with tempfile.TemporaryDirectory(prefix="fumehood-bench-") as folder, _group() as entries:
            yield _of_runsc(folder, dict(tier.probe().details).get("platform", ""), entries)
    else:
        yield None


async def _of_engine(word: Word, profile: str) -> PlainCommand:
    program = shutil.which(word)
    if program is None:
        raise UnavailableError(f"there is no command {word!r}", tier=word)
    service = await in_thread(reach, word)
    try:
        host: Host = await learn(service.engine, None, None)
        path = service.engine.path
    finally:
        service.close()
    wanted = spec.Container(
        name="",
        policy=Policy(),
        image=host.image,
        user=host.user(),
        held=host.hard,
        owner=owners.ours(),
        runtime=None,
        binds=(),
        seccomp=profile,
    )
    if word == "docker":
        flags, note = docker_flags(spec.docker_body(wanted)), "its flags cannot mask files of /proc"
        arguments = [program, f"--host=unix://{path}", "run", "--rm", *flags]
    else:
        flags, note = podman_flags(spec.podman_body(wanted)), "its flags give a tmpfs neither an owner nor inodes"
        arguments = [program, "run", "--rm", *flags]
    return PlainCommand(f"{word} run --rm", (*arguments, host.image, *PYTHON[1:]), note)


def docker_flags(body: dict[str, Any]) -> list[str]:
    """``docker run``'s flags for what :func:`fumehood.tiers.container.spec.docker_body` asks the API for."""
    host = body["HostConfig"]
    assert not host["Mounts"] and "Runtime" not in host
    return [
        f"--network={host['NetworkMode']}",
        "--read-only",
        *(f"--cap-drop={name}" for name in host["CapDrop"]),
        *(f"--security-opt={option}" for option in host["SecurityOpt"]),
        f"--ipc={host['IpcMode']}",
        f"--cgroupns={host['CgroupnsMode']}",
        f"--memory={host['Memory']}",
        f"--memory-swap={host['MemorySwap']}",
        f"--cpus={host['NanoCpus'] / 1e9:g}",
        f"--pids-limit={host['PidsLimit']}",
        *(f"--tmpfs={path}:{options}" for path, options in host["Tmpfs"].items()),
        *(f"--ulimit={limit['Name']}={limit['Soft']}:{limit['Hard']}" for limit in host["Ulimits"]),
        f"--log-driver={host['LogConfig']['Type']}",
        f"--restart={host['RestartPolicy']['Name']}",
        f"--user={body['User']}",
        f"--workdir={body['WorkingDir']}",
        f"--hostname={body['Hostname']}",
        *(f"--env={item}" for item in body["Env"]),
        *(f"--label={name}={value}" for name, value in body["Labels"].items()),
        f"--entrypoint={body['Entrypoint'][0]}",
    ]


def podman_flags(body: dict[str, Any]) -> list[str]:
    """``podman run``'s flags for what :func:`fumehood.tiers.container.spec.podman_body` asks the API for."""
    groups = body["resource_limits"]
    return [
        f"--network={body['netns']['nsmode']}",
        "--read-only",
        "--read-only-tmpfs=false",
        *(f"--cap-drop={name}" for name in body["cap_drop"]),
        "--security-opt=no-new-privileges",
        f"--security-opt=seccomp={body['seccomp_profile_path']}",
        f"--security-opt=mask={':'.join(body['mask'])}",
        *(f"--{kind}={body[f'{kind}ns']['nsmode']}" for kind in ("ipc", "pid", "uts")),
        f"--cgroupns={body['cgroupns']['nsmode']}",
        *_podman_groups(groups),
        *(f"--tmpfs={mount['destination']}:{_podman_options(mount['options'])}" for mount in body["mounts"]),
        *(f"--ulimit={r['type'].lower().removeprefix('rlimit_')}={r['soft']}:{r['hard']}" for r in body["r_limits"]),
        f"--log-driver={body['log_configuration']['driver']}",
        f"--user={body['user']}",
        f"--workdir={body['work_dir']}",
        f"--hostname={body['hostname']}",
        "--unsetenv-all",
        *(f"--env={name}={value}" for name, value in body["env"].items()),
        *(f"--label={name}={value}" for name, value in body["labels"].items()),
        f"--entrypoint={body['entrypoint'][0]}",
    ]


def _podman_groups(groups: dict[str, dict[str, int]]) -> Iterator[str]:
    if "memory" in groups:
        yield f"--memory={groups['memory']['limit']}"
        yield f"--memory-swap={groups['memory']['swap']}"
    if "cpu" in groups:
        yield f"--cpu-quota={groups['cpu']['quota']}"
        yield f"--cpu-period={groups['cpu']['period']}"
    if "pids" in groups:
        yield f"--pids-limit={groups['pids']['limit']}"


def _podman_options(options: list[str]) -> str:
    """Without the bounds that the command line takes for unknown, see ``Scratch.mounts``."""
    *common, bounds = options
    return ",".join([*common, bounds.partition(",")[0]])


@contextlib.contextmanager
def _group() -> Iterator[tuple[int, ...]]:
    """A control group with the tier's limits: without one, a busy host would serve the command before the tier.

    Nobody can enter by himself on v2, so there is none then.
    """
    found = cgroup.find()
    if found.version != 1:
        yield ()
        return
    limits = Policy().limits
    with found.open(sweep=False) as tree:
        pids = limits.pids + overhead_tasks(limits)
        group = tree.create("plain", memory_bytes=limits.memory_bytes, pids=pids, cpus=limits.cpus)
        entries = group.entries()
        try:
            yield tuple(entries)
        finally:
            for entry in entries:
                os.close(entry)


def _of_runsc(folder: str, platform: str, entries: tuple[int, ...]) -> PlainCommand:
    program, image = runsc.find(), store.find(store.DEFAULT_NAME)
    if program is None or image is None:
        raise UnavailableError("there is no runsc, or no image", tier="gvisor")
    scratch = f"{folder}/scratch"
    for name in ("state", "scratch", *(f"scratch/{name}" for name in bundle.FOLDERS)):
        os.mkdir(f"{folder}/{name}")
    limits = Policy().limits
    config = bundle.config(str(image.rootfs), scratch, [], bundle.rlimits(limits, ("memory",)), bundle.guest_uid())
    config["process"]["args"] = list(PYTHON)
    Path(folder, "config.json").write_text(json.dumps(config))
    os.chmod(folder, 0o711)  # the Sentry, as nobody, must reach it
    arguments = runsc.command(program, platform, state=f"{folder}/state", bundle=folder, ident="NAME")
    where = "in a control group with the same limits" if entries else "without a control group"
    return PlainCommand("runsc run", tuple(arguments), f"of the same bundle, {where}", entries)
