"""The control API: sandboxes made, listed, looked at, prolonged, killed."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from fumehood.e2b_server.http import Scope
from fumehood.e2b_server.sandboxes import Box, Sandboxes
from fumehood.errors import FumehoodError, PolicyError, StartError

#: What envd of that version can do is what envd.py serves; the SDK asks by version.
ENVD_VERSION = "0.6.1"
_TIMEOUT_S = 300.0
_BASE = ("/sandboxes", "/v2/sandboxes")

Answer = tuple[int, Any]


async def serve(sandboxes: Sandboxes, scope: Scope, body: bytes) -> Answer:
    """One request: status, and a value for JSON."""
    method, path = scope["method"], scope["path"]
    try:
        values = json.loads(body) if body else {}
        if not isinstance(values, dict):
            raise ValueError("the body is not an object")
        if path in _BASE:
            if method == "POST":
                return await _create(sandboxes, values)
            return (200, [_view(box) for box in sandboxes.all()]) if method == "GET" else _unknown(path)
        return await _one(sandboxes, method, path, values)
    except (ValueError, TypeError) as error:
        return 400, {"code": 400, "message": str(error)[:500]}
    except StartError as error:
        return 503, {"code": 503, "message": error.message[:500]}
    except FumehoodError as error:
        return 500, {"code": 500, "message": error.message[:500]}


async def _one(sandboxes: Sandboxes, method: str, path: str, values: dict[str, Any]) -> Answer:
    base = next((b for b in reversed(_BASE) if path.startswith(b + "/")), None)
    if base is None:
        return _unknown(path)
    ident, _, action = path.removeprefix(base + "/").partition("/")
    box = sandboxes.find(ident)
    if box is None:
        return 404, {"code": 404, "message": f"sandbox {ident} not found"}
    if method == "DELETE" and not action:
        await sandboxes.kill(box)
        return 204, None
    if method == "GET" and not action:
        return 200, _view(box)
    if method == "POST" and action in ("timeout", "connect", "refreshes"):
        sandboxes.prolong(box, _seconds(values.get("timeout", values.get("duration", _TIMEOUT_S))))
        return (200, _made(box)) if action == "connect" else (204, None)
    return _unknown(path)


async def _create(sandboxes: Sandboxes, values: dict[str, Any]) -> Answer:
    network = values.get("network") or {}
    if values.get("allow_internet_access") is True or network.get("allowOut"):
        raise PolicyError("this endpoint gives no sandbox a network")
    box = await sandboxes.create(
        template=str(values.get("templateID", ""))[:200],
        timeout_s=_seconds(values.get("timeout", _TIMEOUT_S)),
        metadata=_texts(values.get("metadata")),
        envs=_texts(values.get("envVars")),
    )
    return 201, _made(box)


def _made(box: Box) -> dict[str, Any]:
    return {
        "templateID": box.template,
        "sandboxID": box.ident,
        "clientID": "fumehood",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": box.token,
        "trafficAccessToken": box.traffic_token,
        "domain": None,
    }


def _view(box: Box) -> dict[str, Any]:
    limits = {"cpuCount": 1, "memoryMB": 256, "diskSizeMB": 64}
    return {
        **_made(box),
        **limits,
        "alias": box.template,
        "metadata": box.metadata,
        "startedAt": _iso(box.started_at),
        "endAt": _iso(box.ends_at),
        "state": "running",
    }


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat()


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{value!r} is not a number of seconds")
    return float(value)


def _texts(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("a mapping of names to texts was expected")
    return value


def _unknown(path: str) -> Answer:
    return 404, {"code": 404, "message": f"{path} is not served here"}
