"""The inside of a worker, with a runtime that is nothing but a wait."""

from __future__ import annotations

import socket
import subprocess
import sys

from fumehood.guest.agent import EXIT_INTERRUPTED
from fumehood.tiers.worker_guest import Stream

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


def test_an_interrupt_between_two_states_ends_the_next_program_before_it_begins(tmp_path: object) -> None:
    slow = f"{tmp_path}/restored"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        worker = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=str(tmp_path)
        )
        theirs.close()
        stream = Stream(ours.fileno(), ours.fileno())
        try:
            stream.send({"op": "configure", "slow": slow})
            assert stream.receive()[0]["op"] == "ready"
            for ident in (1, 2):
                exec_ = {"op": "exec", "id": ident, "env_bytes": 0, "stdin": False, "output_bytes": 99}
                stream.send({**exec_, "overflow": "truncate"}, b"x")
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
        finally:
            ours.close()
            worker.wait(30)
