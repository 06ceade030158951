"""`kill -9` of the real server, its engine, the orchestrator, a worker, the trainer and the launcher."""

import sys
from pathlib import Path

import pytest

from tests.e2e.runs import done

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(1800)]


def test_a_run_that_is_killed_comes_to_the_policy_of_one_that_is_not() -> None:
    """Killed over ZeroMQ; test_colocate_kills.py kills over the filesystem."""
    done("-m", "benchmarks.kills", "--kills", "0", "--same", "--check", program=Path(sys.executable))
