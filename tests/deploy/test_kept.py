"""A program that is started again: after which ends, after which pauses, how often, and what is said of it."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import kept
from deploy.kept import Kept
from deploy.processes import Again, Program
from deploy.restarts import AWAY
from transport.errors import START_AGAIN
from transport.status import FAILED, FINISHED, read_status

FAKE = Path(__file__).with_name("fake_program.py")
Start = Callable[..., Kept]
ALWAYS = Again(limit=None, exit_codes=None)
WORKS = "status:{status}:training:3 sleep:600"
"""A trainer in step 3."""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
    return chosen


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts fake programs that end when the test does; looks and pauses are short."""
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(kept, "LOOK_S", 0.0)
    started: list[Kept] = []
    with (tmp_path / "lock").open("w") as lock:

        def begin(steps: str, *, again: Again | None = ALWAYS, port: int | None = None, **more: Any) -> Kept:
            steps = steps.format(status=tmp_path / "train.json")
            program = Program(
                role="train" if port is None else "teacher",
                command=(sys.executable, "-I", "-S", str(FAKE), f"pids:{tmp_path}/pids", *steps.split()),
                log=tmp_path / "train.log",
                environment=dict(os.environ),
                address=None if port is None else ("127.0.0.1", port),
                silent=port is not None,
                again=again,
            )
            started.append(Kept(program, lock=lock.fileno(), status=tmp_path / "train.json", **more))
            return started[-1]

        yield begin
        for program in started:
            program.kill()
            program.close()


def until(program: Kept, holds: Callable[[], bool]) -> None:
    """Looks after the program until something is so."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        program.poll()
        program.go_on()
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("not within 30 s")


def state(folder: Path) -> str:
    return str((read_status(folder / "train.json") or {}).get("state"))


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def kill(folder: Path, number: signal.Signals = signal.SIGKILL) -> None:
    """The program that was started last."""
    os.kill(pids(folder)[-1], number)


def pauses(errors: str) -> list[str]:
    """Between an end and the next start, as they were said."""
    lines = [line for line in errors.splitlines() if "started again" in line]
    return [line.partition("started again in ")[2].partition(" s")[0] for line in lines]


# --- a server ---


def test_pauses_double_and_the_status_file_counts_the_ends(
    start: Start, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(f"listen:{port} sleep:600", port=port)
    for number in (1, 2, 3):
        until(server, lambda: state(tmp_path) == "serving")
        kill(tmp_path)
        until(server, lambda: len(pids(tmp_path)) == number + 1)  # noqa: B023 (called at once)
    until(server, lambda: state(tmp_path) == "serving")
    assert (server.num_ends, server.exit) == (3, None)
    assert pauses(capsys.readouterr().err) == ["0.05", "0.1", "0.2"]
    fields = read_status(tmp_path / "train.json") or {}
    assert fields["message"] == "it has ended 3 times by itself"
    assert fields["pid"] == server.pid


def test_it_is_started_again_in_the_environment_of_its_first_start(
    start: Start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    server = start(f"variable:CUDA_VISIBLE_DEVICES listen:{port} sleep:600", port=port)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    until(server, lambda: state(tmp_path) == "serving")
    kill(tmp_path)
    until(server, lambda: server.log_tail(2) == "3\n3")


def test_after_being_up_for_long_the_pauses_begin_anew(
    start: Start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "STEADY_S", 0.0)
    server = start(f"listen:{port} sleep:600", port=port)
    for number in (1, 2):
        until(server, lambda: state(tmp_path) == "serving")
        server.poll()
        kill(tmp_path)
        until(server, lambda: len(pids(tmp_path)) == number + 1)  # noqa: B023 (called at once)
    assert pauses(capsys.readouterr().err) == ["0.05", "0.05"]


def test_a_server_that_never_answered_has_ended(start: Start, port: int, tmp_path: Path) -> None:
    server = start("exit:3", port=port)
    until(server, lambda: server.exit is not None)
    assert str(server.exit) == "ended with exit code 3"
    assert (server.num_ends, state(tmp_path)) == (0, FAILED)


def test_a_server_that_was_told_to_end_has_ended(start: Start, port: int, tmp_path: Path) -> None:
    server = start(f"listen:{port} sleep:600", port=port)
    until(server, lambda: state(tmp_path) == "serving")
    server.send(signal.SIGTERM)
    until(server, lambda: server.exit is not None)
    assert str(server.exit) == "ended with exit code 143"
    assert (server.num_ends, state(tmp_path)) == (0, FINISHED)


def test_a_server_whose_engine_has_ended_is_started_again_and_one_with_an_error_is_not(
    start: Start, port: int, tmp_path: Path
) -> None:
    again, mark = Again(limit=3, exit_codes=frozenset({START_AGAIN})), tmp_path / "go"
    server = start(f"listen:{port} wait:{mark} exit:{START_AGAIN}", port=port, again=again)
    until(server, lambda: state(tmp_path) == "serving")
    mark.touch()
    until(server, lambda: server.away is not None)
    server.kill()
    mark.unlink()
    failing = start(f"listen:{port} wait:{mark} exit:1", port=port, again=again)
    until(failing, lambda: state(tmp_path) == "serving")
    mark.touch()
    until(failing, lambda: failing.exit is not None)
    assert (str(failing.exit), failing.num_ends) == ("ended with exit code 1", 0)


def test_one_that_cannot_be_started_again_now_is_tried_later(
    start: Start, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(f"listen:{port} sleep:600", port=port)
    until(server, lambda: state(tmp_path) == "serving")
    working = server.program.log
    object.__setattr__(server.program, "log", tmp_path / "nowhere" / "train.log")
    kill(tmp_path)
    until(server, lambda: server.num_ends == 2)
    object.__setattr__(server.program, "log", working)
    until(server, lambda: len(pids(tmp_path)) == 2)
    said = capsys.readouterr().err
    assert "grpo-teacher was killed by SIGKILL and could not be started: [Errno 2] No such file" in said


# --- a trainer or an orchestrator, which say in which step they are ---


def test_a_trainer_that_is_killed_goes_on_with_the_arguments_for_that_and_is_not_gone_meanwhile(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Again(limit=3, arguments=("print:resumed",))
    trainer = start(WORKS, again=again, whence=lambda: ", from the checkpoint of step 2")
    until(trainer, lambda: state(tmp_path) == "training")
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 600.0)
    kill(tmp_path)
    until(trainer, lambda: trainer.away is not None)
    fields = read_status(tmp_path / "train.json") or {}
    assert (fields["state"], fields["pid"]) == (AWAY, os.getpid())
    assert fields["message"] == "it has ended once by itself: was killed by SIGKILL"
    monkeypatch.setattr(trainer, "_again_at_s", 0.0)
    until(trainer, lambda: len(pids(tmp_path)) == 2)
    until(trainer, lambda: state(tmp_path) == "training")
    trainer.poll()
    assert capsys.readouterr().err.splitlines() == [
        "grpo-train was killed by SIGKILL; the run goes on, and it is started again in 60 s (1 of 3), from the "
        f"checkpoint of step 2; its log is {tmp_path}/train.log",
        "grpo-train works again",
    ]
    log = (tmp_path / "train.log").read_text().splitlines()
    assert log == ["grpo-train was killed by SIGKILL; started again with print:resumed"]
    command = Path(f"/proc/{pids(tmp_path)[-1]}/cmdline").read_bytes().split(b"\0")
    assert command[-2] == b"print:resumed"


def test_one_that_is_killed_before_it_was_up_has_ended(start: Start, tmp_path: Path) -> None:
    trainer = start("status:{status}:loading sleep:600")
    until(trainer, lambda: state(tmp_path) == "loading")
    kill(tmp_path)
    until(trainer, lambda: trainer.exit is not None)
    assert (str(trainer.exit), trainer.num_ends, state(tmp_path)) == ("was killed by SIGKILL", 0, "loading")


def test_one_that_is_killed_as_soon_as_it_is_up_is_started_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOOK_S", 600.0)  # so that no look comes between
    trainer = start("status:{status}:training:3 kill:SIGKILL", again=Again(limit=1))
    until(trainer, lambda: trainer.num_ends == 1)


def test_once_it_was_up_it_may_also_die_while_it_starts_again(start: Start, tmp_path: Path) -> None:
    trainer = start("status:{status}:training:3 sleep:600", again=Again(limit=2, arguments=("--more",)))
    until(trainer, lambda: state(tmp_path) == "training")
    os.kill(pids(tmp_path)[-1], signal.SIGKILL)
    until(trainer, lambda: len(pids(tmp_path)) == 2)
    kill(tmp_path)
    until(trainer, lambda: trainer.num_ends == 2)


def test_after_the_last_time_it_has_ended_and_says_how_often_it_was(start: Start, tmp_path: Path) -> None:
    trainer = start("status:{status}:training:3 kill:SIGSEGV", again=Again(limit=2))
    until(trainer, lambda: trainer.exit is not None)
    assert str(trainer.exit) == "was killed by SIGSEGV, after it had been started again 2 times"
    assert len(pids(tmp_path)) == 3


@pytest.mark.parametrize("end", ["exit:1", "exit:2", "exit:143"])
def test_an_end_of_its_own_is_its_end(start: Start, tmp_path: Path, end: str) -> None:
    trainer = start(f"status:{{status}}:training:3 {end}", again=Again(limit=3, exit_codes=frozenset({START_AGAIN})))
    until(trainer, lambda: trainer.exit is not None)
    assert (trainer.num_ends, len(pids(tmp_path))) == (0, 1)


def test_one_that_is_not_to_return_has_ended(start: Start) -> None:
    trainer = start("status:{status}:training:3 kill:SIGKILL", again=None)
    until(trainer, lambda: trainer.exit is not None)
    assert str(trainer.exit) == "was killed by SIGKILL"


def test_one_that_is_killed_when_its_work_was_done_has_ended_well(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = start("status:{status}:finishing:5 kill:SIGKILL", work_done=lambda: "; a checkpoint is missing")
    until(trainer, lambda: trainer.exit is not None)
    assert trainer.exit is not None
    assert (trainer.exit.status, trainer.num_ends) == (0, 0)
    said = "grpo-train was killed by SIGKILL when its work was done; a checkpoint is missing\n"
    assert capsys.readouterr().err == said
    fields = read_status(tmp_path / "train.json") or {}
    assert (fields["state"], fields["step"]) == (FINISHED, 5)
    assert fields["message"] == "was killed by SIGKILL when its work was done"


def test_one_that_is_told_to_end_while_it_is_away_has_failed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 600.0)
    trainer = start("status:{status}:training:3 kill:SIGKILL")
    until(trainer, lambda: trainer.away is not None)
    trainer.send(signal.SIGTERM)
    until(trainer, trainer.poll)
    assert str(trainer.exit) == "was killed by SIGKILL"
    fields = read_status(tmp_path / "train.json") or {}
    assert fields["state"] == FAILED
    assert fields["message"] == "was killed by SIGKILL, and was told to end before it was started again"


def test_one_that_is_told_to_end_as_it_starts_again_has_failed(start: Start, tmp_path: Path) -> None:
    mark = tmp_path / "go"
    mark.touch()
    trainer = start(f"wait:{mark} {WORKS}")
    until(trainer, lambda: state(tmp_path) == "training")
    mark.unlink()
    kill(tmp_path)
    until(trainer, lambda: state(tmp_path) == "starting" and len(pids(tmp_path)) == 2)
    trainer.send(signal.SIGTERM)
    until(trainer, trainer.poll)
    fields = read_status(tmp_path / "train.json") or {}
    assert (fields["state"], fields["message"]) == (FAILED, "ended with exit code 143 when it was told to end")


def test_where_the_run_is_about_to_end_one_that_is_away_stays_so(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 600.0)
    trainer = start("status:{status}:training:3 kill:SIGKILL")
    until(trainer, lambda: trainer.away is not None)
    trainer.hold()
    monkeypatch.setattr(trainer, "_again_at_s", 0.0)
    guard = Path(f"/proc/{trainer.pid}")
    until(trainer, lambda: not guard.exists())
    trainer.go_on()
    assert (str(trainer.away), trainer.exit, state(tmp_path)) == ("was killed by SIGKILL", None, AWAY)
    assert len(pids(tmp_path)) == 1


def test_where_the_run_is_about_to_end_the_next_end_counts(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = start(WORKS)
    until(trainer, lambda: state(tmp_path) == "training")
    trainer.hold()
    kill(tmp_path)
    until(trainer, lambda: trainer.exit is not None)
    assert (str(trainer.exit), trainer.num_ends) == ("was killed by SIGKILL", 0)
    assert capsys.readouterr().err == ""


def test_what_does_not_hold_any_more_is_overruled_at_the_start_after_that(start: Start, tmp_path: Path) -> None:
    changed: list[str] = []
    again = Again(limit=3, arguments=("--more",))
    trainer = start(WORKS, again=again, overrule=lambda: tuple(changed))
    until(trainer, lambda: state(tmp_path) == "training")
    kill(tmp_path)
    until(trainer, lambda: state(tmp_path) == "training" and len(pids(tmp_path)) == 2)
    changed.append("--now")
    kill(tmp_path)
    until(trainer, lambda: len(pids(tmp_path)) == 3)
    log = (tmp_path / "train.log").read_text().splitlines()
    said = "grpo-train was killed by SIGKILL; started again with --more"
    assert log == [said, f"{said} --now"]


def test_what_lost_its_guard_is_ended_before_the_next_start(start: Start, tmp_path: Path) -> None:
    tidied: list[list[int]] = []
    trainer = start(WORKS, tidy=lambda: tidied.append(pids(tmp_path)))
    until(trainer, lambda: state(tmp_path) == "training")
    os.kill(trainer.pid, signal.SIGKILL)
    until(trainer, lambda: len(pids(tmp_path)) == 2)
    assert [len(one) for one in tidied] == [1]
    assert json.loads((tmp_path / "train.json").read_text())["state"]
