"""Every silent fault of the matrix still finds the code that it patches."""

import importlib

import pytest

from benchmarks.faults import RUNS
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
