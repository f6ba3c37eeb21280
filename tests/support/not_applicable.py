"""Where a tier departs from the contract of the suite: each departure with the tests that it makes not applicable.

A reason is a fact about the tier that its documentation tells too. A test named here that would pass after all fails
the suite, so that the list cannot outlive its reasons.
"""

from __future__ import annotations

#: Tier -> reason -> parts of test ids: all tests whose id holds one of them.
DEPARTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "gvisor": {
        "FIFOs and sockets live in the Sentry alone, and the host does not see them": (
            "test_links_and_special_files",  # the rest of it is seen in tiers/test_gvisor.py
        ),
        "all memory of the guest is the Sentry's, which the kernel kills as a whole": (
            "test_a_child_killed_for_memory",
        ),
        "its terminals (of 2022) know no end of input, and no signals by a key or by a new size": (
            "test_a_pseudo_terminal",  # what they know is seen in tiers/test_gvisor.py
        ),
    },
    "wasm": {
        "WASI has no processes, no fork and no subprocess": (
            "os.fork",
            "test_cpu_of_all_processes_together",
            "test_a_child_killed_for_memory",
            "test_pids",
            "test_a_daemon_does_not_delay",
            "test_environment_is_given_and_nothing_is_inherited",
            "test_a_run_that_is_cancelled_at_any_point",  # its program forks
        ),
        "WASI has no threads": (
            "threading.Thread(",
            "test_threads_count_as_processes",
            "test_background_threads_and_children",
        ),
        "WASI has no signals: a fault is a trap, and a program cannot stop or kill itself": (
            "signal.SIGSTOP",
            "signal.SIGTERM",
            "signal.pause",
            "ctypes.string_at",
            "os.kill(os.getpid(), 9)",
            "flush(); os.abort()",  # it ends by a trap, told on stderr
            "test_signal_of_its_own",
            "test_outcomes_do_not_mix",
            "test_the_deadline_ends_the_exec[wasm-stubborn]",
        ),
        "an interrupt, like any other stop, ends the interpreter and with it the state": (
            "test_interrupt_ends_the_exec_and_nothing_else",
        ),
        "there is no /dev, /proc or /etc": ("/dev/full",),
        "WASI refuses absolute links, special files, names that are not UTF-8 and modes": (
            "test_links_and_special_files",
            "test_a_folder_that_becomes_a_link",
            "test_hostile_names",
            "test_depth_is_capped",
            "test_unreadable_and_setuid_files",
            "test_files_of_the_host_follow_no_link",
            "test_stat_rename_and_folders",
            "test_what_leaves_in_a_tar_is_checked",
        ),
        "WASI answers other error numbers, and resource limits cannot be asked for": (
            "test_open_files",
            "test_mounts_are_read_only_below_mnt",
            "test_no_core_and_no_way_to_raise_a_limit",
        ),
        "the runtime refuses memory over the limit, so that the program sees MemoryError": (
            "TestFullPython::test_memory[",
        ),
        "a program that closes the runtime's own descriptors has no folders any more": ("test_live_too",),
        "two live sandboxes share no name of a file, so there is nothing to look for": (
            "test_a_program_does_not_see_another_one",
        ),
    },
    "e2b": {
        "the provider's template decides resources, so a limit of ours for them is refused by name": (
            "test_code_of_10_mb",
            "test_cpu_of_all_processes_together",
            "test_sleeping_uses_no_cpu",
            "TestFullPython::test_memory",
            "test_a_child_killed_for_memory",
            "test_pids",
            "test_threads_count_as_processes",
            "test_disk",
            "TestFullPython::test_files",
            "test_open_files",
            "test_usage_",
            "test_a_file_that_does_not_fit",
            "test_many_runs_at_once",
            "hostile/test_thousand_runs.py::test_nothing_is_left",
            "test_a_file_without_end_is_cut_off",
            "test_all_164_pass",  # test_e2b.py runs them within the service's limits
        ),
        "a single run is a script of the template's Python behind a login shell": (
            "null bytes",
            "raise KeyboardInterrupt",
            "test_environment_is_given_and_nothing_is_inherited",
            "test_main_looks_like_a_fresh_interpreter",
        ),
        "the service tells output as text": ("test_unicode_and_binary_come_out",),
        "files are fetched by the service's listing, which knows neither hard links nor modes": (
            "test_links_and_special_files",
            "test_count_is_capped",
            "test_unreadable_and_setuid_files",
        ),
        "displays are a live sandbox's only, so the feature says no": ("test_refused_by_name[e2b-displays]",),
        "a cell takes no standard input": ("test_output_and_stdin_belong_to_their_exec",),
        "an interrupted cell says nothing": ("test_interrupt_ends_the_exec_and_nothing_else",),
        "a cell that is abandoned tells no end, so a deadline destroys the microVM": (
            "test_the_deadline_ends_the_exec[e2b-loop]",
            "test_the_deadline_ends_the_exec[e2b-sleep]",
        ),
    },
}


def reason_for(tier: str, test: str) -> str | None:
    """Why the test with this id is not applicable to the tier, or None."""
    for reason, parts in DEPARTURES.get(tier, {}).items():
        if any(part in test for part in parts):
            return reason
    return None
