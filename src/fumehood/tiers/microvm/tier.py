"""The microVM as a tier: templates by policy, one clone per sandbox, and what is held around and inside it."""

from __future__ import annotations

import asyncio
import os
import platform
from functools import lru_cache

from fumehood import environments
from fumehood.environments import Environment
from fumehood.errors import FumehoodError, PolicyError, StartError, UnavailableError, UnsupportedError
from fumehood.model import Boundary, Policy
from fumehood.tier import Features, Probe, require
from fumehood.tiers.jail.tier import JailTier
from fumehood.tiers.microvm import accelerator, direct, images, machine, posture, qemu, template
from fumehood.tiers.microvm.images import Image
from fumehood.tiers.microvm.machine import MachineEnclosure, MachineSandbox
from fumehood.tiers.microvm.template import Recipe, Template
from fumehood.wire import Channel

#: What a warm sandbox has run: programs that leave no name behind. The emulator translates code when it first runs.
REHEARSALS = (
    "print(sum(i * i for i in range(10)), f'{3.5:.2f}', {'a': [1]})",
    "print(1)",
    "(lambda: print(__import__('json').dumps({'a': [1, 2.5, None]})))()",
    "(lambda os: os.fork() and os.wait())(__import__('os'))",  # the child goes through the end of an interpreter
)
READY_TIMEOUT_S = 60.0
_BUILD = "fumehood image build python --engine microvm"
_SLOW = "without KVM: short glue code, no numeric work (Python 10 to 19 times slower, numpy far more)"

#: Machines that start at the same time, for each processor: more would only make all of them late.
_STARTS_PER_CPU = 2


@lru_cache(maxsize=1)
def features() -> Features:
    """What the tier promises here; the boundary depends on whether KVM boots a guest on this host."""
    hardware = accelerator.chosen() == "kvm"
    return Features(
        boundary=Boundary.HARDWARE if hardware else Boundary.EMULATED,
        summary="a kernel of its own in a QEMU microVM, cloned from a template, inside the jail",
        live=True,
        files=True,
        commands=True,
        contexts=True,
        displays=True,
        background=True,
        pty=True,
        environments=True,
        note="" if hardware else _SLOW,
    )


class MicrovmTier:
    """Tier ``microvm``.

    ``image`` is the name of a built image. ``fresh`` gives each sandbox an interpreter that was executed in it, with an
    address layout and a hash seed of its own, for some 18 times the time without KVM. ``engine`` is the machine
    monitor; there is one so far.
    """

    name = "microvm"

    def __init__(self, *, image: str = images.DEFAULT_NAME, fresh: bool = False, engine: str = "qemu") -> None:
        if engine != "qemu":
            raise PolicyError(f"unknown engine {engine!r} of tier microvm; there is qemu")
        self._image_name = image
        self._fresh = fresh
        self._jail: JailTier | None = None
        self._templates: dict[str, Template] = {}
        self._obtaining = asyncio.Lock()
        self._starting = asyncio.Semaphore(_STARTS_PER_CPU * (os.cpu_count() or 1))

    @property
    def features(self) -> Features:
        """See :func:`features`."""
        return features()

    def probe(self) -> Probe:
        """QEMU, an image, the jail around it, and whether KVM boots a guest; the parts are kept for this process."""
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return Probe(False, "needs Linux on x86-64", "use another tier")
        try:
            program = qemu.find()
            image = images.find(self._image_name)
        except FumehoodError as error:
            return Probe(False, error.message, error.remedy or "")
        if image is None:
            return Probe(False, f"no image is called {self._image_name!r}", _BUILD)
        jail = JailTier().probe()
        if not jail.available:
            return Probe(False, f"needs the jail around QEMU: {jail.reason}", jail.remedy)
        details = [("qemu", program.version), ("accelerator", accelerator.chosen())]
        details += [("kvm", accelerator.verdict()), ("guest kernel", image.kernel_release)]
        hard = ("memory", "pids", "disk", *(name for name in jail.hard if name == "cpu"))
        return Probe(True, hard=hard, details=tuple(details))

    async def create(self, policy: Policy) -> MachineSandbox:
        """A clone of the policy's template, adopted and ready. The first one of its kind boots the template."""
        require(self, policy)
        try:
            made = await self._template(policy)
            async with self._starting:
                return await self._clone(policy, made)
        except OSError as error:
            if isinstance(error, FumehoodError):
                raise
            raise StartError(f"the machine could not be set up: {error}", tier=self.name) from None

    async def create_warm(self, policy: Policy) -> MachineSandbox:
        """The same for later use: it has run a few programs of ours, so that their code is translated already."""
        sandbox = await self.create(policy)
        try:
            await sandbox.rehearse(REHEARSALS)
            return sandbox
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise

    async def _clone(self, policy: Policy, made: Template) -> MachineSandbox:
        shape = made.recipe.shape
        arguments = shape.clone_arguments(made.recipe.program)
        with made.state() as state:
            fds = {qemu.MEMORY_FD: made.memory_fd, qemu.STATE_FD: state}
            started = await machine.start(self._jailed(made.recipe), policy.limits, shape, arguments, fds)
        sandbox: MachineSandbox | None = None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await started.monitor.restore(qemu.STATE_FD)
                started.control.send(template.adoption(policy, fresh=self._fresh))  # now, for it tells the time
                receipt = posture.receipt(await started.control.line(), policy, made, started.receipt)
            enclosure = MachineEnclosure(started, policy)
            fd = started.agent.detach()
            sandbox = MachineSandbox(Channel(fd, fd), enclosure, policy, receipt, env=direct.ENVIRONMENT)
            await sandbox.ready(READY_TIMEOUT_S)
            return sandbox
        except BaseException as error:
            if sandbox is not None:
                await asyncio.shield(sandbox.close())
            else:
                await asyncio.shield(started.discard())
            if isinstance(error, TimeoutError):
                raise StartError("the machine was not ready in time", tier=self.name) from None
            raise

    async def _template(self, policy: Policy) -> Template:
        recipe = self._recipe(policy)
        key = recipe.key()
        async with self._obtaining:
            found = self._templates.get(key)
            if found is None or found.stale:
                if found is not None:
                    found.close()
                found = self._templates[key] = await template.obtain(recipe, self._jailed(recipe))
            return found

    def _recipe(self, policy: Policy) -> Recipe:
        image = images.find(self._image_name)
        if image is None:
            raise UnavailableError(f"no image is called {self._image_name!r}", tier=self.name, remedy=_BUILD)
        environment = environments.find(policy.environment) if policy.environment is not None else None
        if environment is not None:
            _check_fit(environment, image)
        shape = template.shape_for(policy.limits, image, environment, accelerator.chosen())
        return Recipe(qemu.find(), shape, image, environment, policy.preload)

    def _jailed(self, recipe: Recipe) -> JailTier:
        if self._jail is None:
            self._jail = JailTier(guest=machine.jail_guest(recipe.program, recipe.shape.accelerator))
        return self._jail

    async def close(self) -> None:
        """Kill what is left of the machines and let go of the templates in memory. Idempotent."""
        templates, self._templates = list(self._templates.values()), {}
        for made in templates:
            made.close()
        if self._jail is not None:
            jail, self._jail = self._jail, None
            await jail.close()


def _check_fit(environment: Environment, image: Image) -> None:
    if environment.python != image.python or environment.platform != "linux-x86_64":
        raise UnsupportedError(
            f"the environment {environment.name!r} is for Python {environment.python} on {environment.platform}, "
            f"and the image {image.name!r} has Python {image.python}",
            unmet=("environment",),
            tier="microvm",
            remedy=f"build it for Python {image.python}: fumehood env build NAME --python PATH",
        )
