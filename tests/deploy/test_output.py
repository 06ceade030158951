"""Commands go on, or end without a word, where nobody reads what they print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transport.run import found_run

GRPO = Path(sys.executable).with_name("grpo")
AS_GRPO = """
import runpy, sys
from deploy.output import go_on_unread

go_on_unread()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LAUNCHER = (sys.executable, "-c", AS_GRPO, Path(__file__).with_name("fake_launcher.py"))


def unread(*command: str | Path, both: bool = False) -> subprocess.CompletedProcess[str]:
    """The end of a command whose standard output, or both of its streams, nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        error = subprocess.STDOUT if both else subprocess.PIPE
        return subprocess.run(command, stdout=writer, stderr=error, text=True, timeout=60)
    finally:
        os.close(writer)


@pytest.mark.parametrize("argv", [("status",), ("status", "--json")])
def test_a_command_that_only_prints_ends_as_others_do(tmp_path: Path, argv: tuple[str, ...]) -> None:
    found_run(tmp_path / "run")
    done = unread(GRPO, *argv, tmp_path / "run")
    assert (done.returncode, done.stderr) == (141, "")


def test_its_errors_have_their_exit_code(tmp_path: Path) -> None:
    done = unread(GRPO, "status", tmp_path)
    assert done.returncode == 2
    assert "holds no run" in done.stderr


@pytest.mark.parametrize("argv", [("--help",), ("configs/quickstart", "--dry-run"), ("ablate", "--help")])
def test_a_command_that_may_do_more_goes_on(argv: tuple[str, ...]) -> None:
    done = unread(GRPO, *argv)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_comes_to_its_end_and_its_exit_code(tmp_path: Path) -> None:
    programs = ["sleep:600", "sleep:0.3 exit:0", f"sleep:0.3 touch:{tmp_path / 'done'} exit:0"]
    done = unread(*LAUNCHER, tmp_path / "run", "0", *programs, both=True)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()
    failed = unread(*LAUNCHER, tmp_path / "failed", "0", "sleep:600", "sleep:600", "exit:3")
    assert failed.returncode == 1
    assert "error: grpo-orch ended with exit code 3" in failed.stderr
