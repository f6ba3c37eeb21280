"""Tests whose promise is a time: on a busy machine they may miss it, and are tried again, twice, reported as RERUN.

All others must pass at once: what fails now and then is a fault, of the test or of what it tests.
"""

from __future__ import annotations

#: What is promised -> parts of test ids: all tests whose id holds one of them.
PROMISES: dict[str, tuple[str, ...]] = {
    "a run is over within 0.5 s of its deadline": (
        "e2b/test_e2b.py::test_the_deadline[",
        "interpreter/test_interpreter.py::test_ends[",
        "microvm/test_machine.py::test_a_hostile_end_is_a_typed_outcome_in_time[",
        "runtimes/test_runtimes_floods.py::test_floods_do_not_grow_the_supervisor[",
        "runtimes/test_runtimes_six_attacks.py::test_1_a_loop[",
        "wasm/test_wasm.py::test_ends[",
    ),
    "what is closed is closed within seconds": (
        "microvm/test_machine.py::test_files_that_do_not_come_in_time_are_told",
        "tiers/test_jail_single.py::test_a_program_that_stops_itself_has_its_deadline",
    ),
}

TRIES = 2
PAUSE_S = 1.0


def promise_of(test: str) -> str | None:
    """What the test with this id promises about time, or None."""
    return next((promise for promise, parts in PROMISES.items() if any(part in test for part in parts)), None)
