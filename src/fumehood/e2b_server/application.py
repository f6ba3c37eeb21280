"""The whole endpoint as one ASGI application: who is asked, and may this caller ask."""

from __future__ import annotations

import hmac

from fumehood.e2b_server import control, envd, interpreter
from fumehood.e2b_server.http import Receive, Scope, Send, answer_json, body_of
from fumehood.e2b_server.sandboxes import Sandboxes

ENVD_PORT = "49983"
INTERPRETER_PORT = "49999"
_TRAFFIC = "e2b-traffic-access-token"


class Endpoint:
    """An ASGI application. ``api_key`` is what the control API takes; each sandbox has a token of its own."""

    def __init__(self, sandboxes: Sandboxes, api_key: str) -> None:
        self._sandboxes = sandboxes
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        ident = headers.get("e2b-sandbox-id")
        if ident is None:
            if not hmac.compare_digest(headers.get("x-api-key", "").encode(), self._key):
                await answer_json(send, 401, {"code": 401, "message": "the API key is wrong"})
                return
            status, value = await control.serve(self._sandboxes, scope, await body_of(receive))
            await answer_json(send, status, value)
            return
        box = self._sandboxes.find(ident)
        if box is None or box.dead.is_set():
            # The words by which the SDK tells a dead sandbox from one that cannot be reached.
            await answer_json(send, 502, {"code": 502, "message": f"The sandbox {ident} was not found"})
            return
        port = headers.get("e2b-sandbox-port", ENVD_PORT)
        header, token = ("x-access-token", box.token) if port == ENVD_PORT else (_TRAFFIC, box.traffic_token)
        if scope["path"] != "/health" and not hmac.compare_digest(headers.get(header, "").encode(), token.encode()):
            await answer_json(send, 401, {"code": 401, "message": "the access token is wrong"})
        elif port == ENVD_PORT:
            await envd.serve(box, scope, receive, send)
        elif port == INTERPRETER_PORT:
            await interpreter.serve(box, scope, await body_of(receive), send)
        else:
            await answer_json(send, 502, {"code": 502, "message": f"port is not open: {port}"})
