"""The inside of a worker, with runtimes that are nothing but a wait."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fumehood.guest.agent import EXIT_INTERRUPTED
from fumehood.tiers.worker_guest import Header, Stream

#: A program runs until it is halted, loses its state by that, and a new state takes as long as a look at ``slow``.
_WORKER = """
import os, sys, time
from fumehood.tiers import worker_guest

class Waiting(worker_guest.WorkerGuest):
    def prepare(self, configuration):
        self.slow = configuration["slow"]
    def program(self, source, header, env, stdin, output):
        output.text("stdout", source.decode())
        self.halted.wait()
        return {"status": 1, "lost": True}
    def restore(self):
        while not os.path.exists(self.slow):
            time.sleep(0.01)

worker_guest.serve(Waiting, int(sys.argv[1]), int(sys.argv[1]), ".")
"""


#: A program prints twice, and ends only when it is halted if it has a text.
_PRINTING = """
import sys
from fumehood.tiers import worker_guest

class Printing(worker_guest.WorkerGuest):
    def prepare(self, configuration):
        pass
    def program(self, source, header, env, stdin, output):
        output.text("stdout", "a")
        output.text("stderr", "b")
        if source:
            self.halted.wait()
        return {"status": 0, "lost": False}

worker_guest.serve(Printing, int(sys.argv[1]), int(sys.argv[1]), ".")
"""

#: A program tells its thread, and takes as long as it says.
_TELLING = """
import sys, threading, time
from fumehood.tiers import worker_guest

class Telling(worker_guest.WorkerGuest):
    def prepare(self, configuration):
        pass
    def program(self, source, header, env, stdin, output):
        output.text("stdout", str(threading.get_ident()))
        output.text("stdout", stdin.decode())
        if source:
            time.sleep(float(source))
        return {"status": 0, "lost": False}

worker_guest.serve(Telling, int(sys.argv[1]), int(sys.argv[1]), ".")
"""

#: A program counts itself in a file, and has one of ours.
_REHEARSED = """
import sys
from fumehood.tiers import worker_guest

class Rehearsed(worker_guest.WorkerGuest):
    rehearsal = b"ours"
    def prepare(self, configuration):
        self.told = configuration["told"]
    def program(self, source, header, env, stdin, output):
        with open(self.told, "ab") as file:
            file.write(source + b"\\n")
        output.text("stdout", "x" * 50)
        return {"status": 0, "lost": False}

worker_guest.serve(Rehearsed, int(sys.argv[1]), int(sys.argv[1]), ".")
"""


@contextlib.contextmanager
def worker(code: str, configuration: Header, folder: object) -> Iterator[Stream]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=str(folder)
        )
        theirs.close()
        stream = Stream(ours.fileno(), ours.fileno())
        try:
            stream.send({"op": "configure", **configuration})
            assert stream.receive()[0]["op"] == "ready"
            yield stream
        finally:
            ours.close()
            process.wait(30)


def request(ident: int) -> Header:
    limits = {"env_bytes": 0, "stdin": False, "output_bytes": 99, "overflow": "truncate"}
    return {"op": "exec", "id": ident, **limits}


def test_what_is_printed_comes_before_the_end_and_in_its_order(tmp_path: object) -> None:
    with worker(_PRINTING, {}, tmp_path) as stream:
        for ident in range(1, 20):
            stream.send(request(ident))
            assert [stream.receive()[0]["op"] for _ in range(3)] == ["out", "err", "done"]


def test_what_is_printed_by_a_program_that_goes_on_comes_before_its_end(tmp_path: object) -> None:
    with worker(_PRINTING, {}, tmp_path) as stream:
        for ident in (1, 2):
            stream.send(request(ident), b"x")
            assert stream.receive() == ({"op": "out", "id": ident}, b"a")
            assert stream.receive() == ({"op": "err", "id": ident}, b"b")
            stream.send({"op": "interrupt"})
            assert stream.receive()[0]["op"] == "done"


def test_an_interrupt_between_two_states_ends_the_next_program_before_it_begins(tmp_path: object) -> None:
    slow = f"{tmp_path}/restored"
    with worker(_WORKER, {"slow": slow}, tmp_path) as stream:
        for ident in (1, 2):
            stream.send(request(ident), b"x")
            if ident == 1:
                assert stream.receive()[0]["op"] == "out"
            stream.send({"op": "interrupt"})  # 2: while there is no state yet
            if ident == 2:
                stream.send({"op": "list", "id": 9, "count": 1})
                assert stream.receive()[0]["op"] == "reply"  # so the interrupt has been taken
                open(slow, "x").close()
            done = stream.receive()[0]
            assert done["op"] == "done" and done["id"] == ident
        assert (done["status"], done["lost"], done["out_bytes"]) == (EXIT_INTERRUPTED, False, 0)


def test_short_programs_share_a_thread_and_their_output_comes_with_their_end(tmp_path: object) -> None:
    with worker(_TELLING, {}, tmp_path) as stream:
        threads = set()
        together = 0
        for ident in range(1, 40):
            stream.send(request(ident))
            header, body = stream.receive()
            if header["op"] == "out":  # the machine had another thing to do for five milliseconds
                assert stream.receive()[0]["op"] == "done"
                continue
            assert header["op"] == "done" and header["tail"] == "out" and header["out_bytes"] == len(body)
            threads.add(body)
            together += 1
        assert together > 20
        assert len(threads) < 3


def test_frames_are_taken_while_a_program_runs_whatever_came_before(tmp_path: object) -> None:
    with worker(_TELLING, {}, tmp_path) as stream:
        for ident in range(1, 40):
            stream.send(request(ident), b"0.004" if ident % 3 else b"0.05")
            stream.send({"op": "list", "id": 1000 + ident, "count": 1})
            got = [stream.receive()[0]["op"]]
            while not {"done", "reply"} <= set(got):
                got.append(stream.receive()[0]["op"])
            if ident % 3 == 0:
                assert got.index("reply") < got.index("done")


def test_a_program_that_waits_for_its_input_has_it_at_once(tmp_path: object) -> None:
    with worker(_TELLING, {}, tmp_path) as stream:
        for ident in range(1, 40):
            stream.send({**request(ident), "stdin": True})
            assert stream.receive() == ({"op": "stdin", "id": ident}, b"")
            stream.send({"op": "stdin", "more": False}, b"!")
            body = b""
            header: Header = {}
            while header.get("op") != "done":
                header, more = stream.receive()
                body += more
            assert body.endswith(b"!")


@pytest.mark.parametrize(("asked", "times"), [({}, 1), ({"rehearsals": 20}, 20)])
def test_a_worker_has_rehearsed_as_often_as_it_was_told_before_it_is_ready(
    tmp_path: Path, asked: Header, times: int
) -> None:
    told = tmp_path / "told"
    with worker(_REHEARSED, {"told": str(told), **asked}, tmp_path) as host:
        assert told.read_bytes() == b"ours\n" * times
        host.send(request(1), b"theirs")
        header, body = host.receive()  # nothing of a rehearsal comes before it
        assert (header["op"], header["id"], header["status"], body) == ("done", 1, 0, b"x" * 50)
        assert told.read_bytes() == b"ours\n" * times + b"theirs\n"
