"""An engine that can be made to fail."""

from __future__ import annotations

import socket
import socketserver
import threading


class Proxy:
    """A Unix socket in front of an engine's, that can cut all connections, refuse new ones, or answer by itself."""

    def __init__(self, target: str, path: str) -> None:
        self.path = path
        self.target = target
        self.cut_off = False
        #: (part of the request line, answer): the first that matches is answered instead of passed on.
        self.answers: list[tuple[bytes, bytes]] = []
        #: Part of the request line -> set when such a request came, and what it waits for then.
        self.held: dict[bytes, tuple[threading.Event, threading.Event]] = {}
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                proxy._serve(self.request, target)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self._server = Server(path, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def _serve(self, client: socket.socket, target: str) -> None:
        first = client.recv(65536)
        line = first.partition(b"\r\n")[0]
        for part, answer in self.answers:
            if part in line:
                client.sendall(answer)
                return
        for part, (came, go) in self.held.items():
            if part in line:
                came.set()
                go.wait()
        if self.cut_off or not first:
            return
        engine = socket.socket(socket.AF_UNIX)
        engine.connect(target)
        with self._lock:
            self._connections += [client, engine]
        engine.sendall(first)
        back = threading.Thread(target=_pass_on, args=(engine, client), daemon=True)
        back.start()
        _pass_on(client, engine)
        back.join()
        engine.close()

    def cut(self) -> None:
        """As if the engine had died: every connection ends, and none is taken."""
        self.cut_off = True
        with self._lock:
            for end in self._connections:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def close(self) -> None:
        self.cut()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
