"""`kill -9` of the real server's engine, the orchestrator, a worker, the trainer and the launcher; and Ctrl-C."""

import signal
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.launched import MODULES, Launched
from tests.e2e.runs import done

pytestmark = [pytest.mark.chaos, pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_run_that_is_killed_comes_to_the_policy_of_one_that_is_not() -> None:
    """Killed over ZeroMQ; test_colocate_kills.py kills over the filesystem."""
    told = done("-m", "benchmarks.kills", "--kills", "0", "--same", "--check", program=Path(sys.executable))
    assert "compared, zmq: orch after step" in told, told


def test_ctrl_c_while_programs_start_ends_all_of_them(tmp_path: Path) -> None:
    with closing(Launched(tmp_path / "run")) as launched:
        launched.until(lambda: all(launched.program(role) for role in MODULES))
        launched.launcher.send_signal(signal.SIGINT)
        code, errors = launched.end()
    assert (code, "SIGINT" in errors.splitlines()[-1]) == (130, True)
