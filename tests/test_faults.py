"""Every silent fault of the matrix still finds the code that it patches."""

import importlib
import json

import pytest

from benchmarks.faults import PAGE, RESULTS, RUNS, steps_promised, table
from benchmarks.seam.silent_faults import FAULTS, by_name


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_replaces_a_function_that_is_there(fault) -> None:
    assert fault.run in RUNS
    for patch in fault.patches:
        owner, name = patch.place(importlib.import_module(patch.module))
        original = getattr(owner, name)
        assert patch.make(original) is not original


def test_names_are_unique() -> None:
    assert len(by_name()) == len(FAULTS)


def test_the_page_shows_what_was_noticed_of_every_fault() -> None:
    results, text = json.loads(RESULTS.read_text()), PAGE.read_text()
    assert results.keys() == by_name().keys()
    assert "\n".join(table(results)) in text


def test_a_share_of_the_rollouts_is_found_within_the_steps_that_two_proofs_a_step_promise() -> None:
    # 0.9^(2 s) <= 0.01 from s = 21.9 on
    assert steps_promised(0.1) == 22
