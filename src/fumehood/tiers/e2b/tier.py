"""The e2b tier: its promises, its probe, and how a sandbox is made."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import weakref
from typing import TYPE_CHECKING, Any

from fumehood.errors import PolicyError, UnavailableError
from fumehood.model import Boundary, Control, Held, Policy, Receipt
from fumehood.tier import Features, Probe, require
from fumehood.tiers.worker import installed

if TYPE_CHECKING:
    from fumehood.tiers.e2b.sandbox import E2BSandbox

_INSTALL = "pip install 'fumehood[e2b]'"
_PACKAGES = ("e2b", "e2b_code_interpreter", "httpx", "connectrpc")

#: A sandbox lives this long at the service beyond what an exec may take, if nothing of ours prolongs or kills it.
MARGIN_S = 60
_LIFE_MIN_S = 300
_REQUEST_TIMEOUT_S = 30.0

FEATURES = Features(
    boundary=Boundary.HARDWARE,
    summary="a Firecracker microVM of the managed service E2B; programs and files leave this host",
    live=True,
    files=True,
    commands=True,
    egress_open=True,
    limits=("wall_s", "output_bytes"),
    claimed=True,
    note="the provider's claim, not verified here",
)


class E2BTier:
    """Tier ``e2b``.

    Key and endpoint come from E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL and E2B_HTTP_VERSION, or from these arguments.
    ``template`` names the service's template, which decides memory, processors and disk; limits of the policy for
    these are refused unless they are the default.
    """

    name = "e2b"
    features = FEATURES

    def __init__(
        self,
        *,
        api_key: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        http_version: str | None = None,
        template: str | None = None,
    ) -> None:
        self._key = api_key or os.environ.get("E2B_API_KEY", "")
        self._options: dict[str, Any] = {"request_timeout": _REQUEST_TIMEOUT_S}
        for name, value in (("api_url", api_url), ("sandbox_url", sandbox_url), ("http_version", http_version)):
            if value is not None:
                self._options[name] = value
        self._template = template
        self._sandboxes: weakref.WeakSet[E2BSandbox] = weakref.WeakSet()

    def __repr__(self) -> str:
        return "E2BTier()"

    def probe(self) -> Probe:
        """Whether the SDK is installed and there is a key. The service is not asked."""
        missing = [package for package in _PACKAGES if not installed(package)]
        if missing:
            return Probe(False, f"the package {missing[0]} is not installed", _INSTALL)
        if not self._key:
            return Probe(False, "there is no API key", "set E2B_API_KEY to a key of https://e2b.dev")
        endpoint = self._options.get("api_url") or os.environ.get("E2B_API_URL") or "the provider's"
        return Probe(True, details=(("endpoint", endpoint),))

    async def create(self, policy: Policy) -> E2BSandbox:
        """A new microVM. Raises UnsupportedError, UnavailableError, StartError; what was made is destroyed then.

        Cancelled while the service makes one, it lets that end and destroys it.
        """
        require(self, policy)
        probe = self.probe()
        if not probe.available:
            raise UnavailableError(probe.reason, tier=self.name, remedy=probe.remedy)
        if any(self._key in value for value in policy.env.values()):
            raise PolicyError("env holds the API key, which is never sent into a sandbox", tier=self.name)
        from fumehood.tiers.e2b.sandbox import E2BSandbox

        life_s = max(_LIFE_MIN_S, math.ceil(policy.limits.wall_s) + MARGIN_S)
        making = asyncio.ensure_future(self._make(policy, life_s))
        try:
            remote = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_destroy_when_made)
            raise
        sandbox = E2BSandbox(remote, policy, _receipt(policy, life_s), secret=self._key, life_s=life_s)
        self._sandboxes.add(sandbox)
        try:
            await sandbox.prepare()
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox

    async def _make(self, policy: Policy, life_s: int) -> Any:
        from e2b_code_interpreter import AsyncSandbox

        from fumehood.tiers.e2b.errors import translate

        try:
            return await AsyncSandbox.create(
                template=self._template,
                timeout=life_s,
                allow_internet_access=policy.egress == ("*",),
                api_key=self._key,
                **self._options,
            )
        except Exception as error:
            raise translate(error, "create", secret=self._key) from None

    async def close(self) -> None:
        """Destroy what is left of this tier's sandboxes. Idempotent."""
        await asyncio.gather(*(sandbox.close() for sandbox in set(self._sandboxes)))


#: Limits that nothing of ours holds there.
_TEMPLATE = ("memory", "pids", "disk", "files", "cpu", "cpu_time")

#: Sandboxes that nobody waits for any more and that are being destroyed.
_orphans: set[asyncio.Task[None]] = set()


def _destroy_when_made(making: asyncio.Future[Any]) -> None:
    if making.cancelled() or making.exception() is not None:
        return

    async def destroy() -> None:
        with contextlib.suppress(Exception):  # the service ends it by itself when its life is over
            await making.result().kill()

    task = asyncio.ensure_future(destroy())
    _orphans.add(task)
    task.add_done_callback(_orphans.discard)


def _receipt(policy: Policy, life_s: int) -> Receipt:
    limits = policy.limits
    claim, hard = Held.BEST_EFFORT, Held.HARD
    network = "open, as the policy asks" if policy.egress == ("*",) else "no internet access"
    controls = (
        Control("microvm", claim, "the provider's claim", "Firecracker"),
        Control("network", Held.OFF if policy.egress == ("*",) else claim, "the provider's claim", network),
        *(Control(name, Held.OFF, "the provider's template decides it", "not read back") for name in _TEMPLATE),
        Control("life", claim, "the provider ends the sandbox by itself", f"{life_s} s unless prolonged"),
        Control("wall", hard, "this process's clock, and a kill by the control API", str(limits.wall_s)),
        Control("output", hard, f"bounded reader, {policy.overflow}", str(limits.output_bytes)),
    )
    notes = ("the boundary is the provider's claim and was not verified", "the program and its files left this host")
    return Receipt("e2b", Boundary.HARDWARE, controls, host="E2B", claimed=True, notes=notes)
