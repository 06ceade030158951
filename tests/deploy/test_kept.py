"""A server that is started again: when, after which pauses, and what is said of it."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import kept
from deploy.kept import Kept
from deploy.processes import Program
from transport.status import read_status

FAKE = Path(__file__).with_name("fake_program.py")
Start = Callable[[str], Kept]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        chosen: int = probe.getsockname()[1]
    return chosen


@pytest.fixture
def start(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts fake servers that end when the test does; looks and pauses are short."""
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(kept, "LOOK_S", 0.0)
    started: list[Kept] = []
    with (tmp_path / "lock").open("w") as lock:

        def begin(steps: str) -> Kept:
            program = Program(
                role="teacher",
                command=(sys.executable, "-I", "-S", str(FAKE), f"pids:{tmp_path}/pids", *steps.split()),
                log=tmp_path / "teacher.log",
                environment=dict(os.environ),
                address=("127.0.0.1", port),
            )
            started.append(Kept(program, lock=lock.fileno(), status=tmp_path / "teacher.json"))
            return started[-1]

        yield begin
        for server in started:
            server.kill()
            server.close()


def until(server: Kept, holds: Callable[[], bool]) -> None:
    """Polls the server until something is so."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        server.poll()
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("not within 30 s")


def state(folder: Path) -> str:
    return str((read_status(folder / "teacher.json") or {}).get("state"))


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def test_pauses_double_and_the_status_file_counts_the_ends(
    start: Start, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(f"listen:{port} sleep:600")
    for number in (1, 2, 3):
        until(server, lambda: state(tmp_path) == "serving")
        os.kill(pids(tmp_path)[-1], signal.SIGKILL)
        until(server, lambda: len(pids(tmp_path)) == number + 1)  # noqa: B023 (called at once)
    until(server, lambda: state(tmp_path) == "serving")
    assert (server.num_ends, server.exit) == (3, None)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("started again in ")[2].split(";")[0] for line in said if "started again" in line] == [
        "0.05 s",
        "0.1 s",
        "0.2 s",
    ]
    fields = read_status(tmp_path / "teacher.json") or {}
    assert fields["message"] == "it has ended 3 times by itself"
    assert fields["pid"] != os.getpid()


def test_after_serving_for_long_the_pauses_begin_anew(
    start: Start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "STEADY_S", 0.0)
    server = start(f"listen:{port} sleep:600")
    for number in (1, 2):
        until(server, lambda: state(tmp_path) == "serving")
        server.poll()
        os.kill(pids(tmp_path)[-1], signal.SIGKILL)
        until(server, lambda: len(pids(tmp_path)) == number + 1)  # noqa: B023 (called at once)
    assert capsys.readouterr().err.count("started again in 0.05 s") == 2


def test_a_server_that_never_answered_has_ended(start: Start, tmp_path: Path) -> None:
    server = start("exit:3")
    until(server, lambda: server.exit is not None)
    assert str(server.exit) == "ended with exit code 3"
    assert (server.num_ends, state(tmp_path)) == (0, "failed")


def test_a_server_that_was_told_to_end_has_ended(start: Start, port: int, tmp_path: Path) -> None:
    server = start(f"listen:{port} sleep:600")
    until(server, lambda: state(tmp_path) == "serving")
    server.send(signal.SIGTERM)
    until(server, lambda: server.exit is not None)
    assert str(server.exit) == "ended with exit code 143"
    assert (server.num_ends, state(tmp_path)) == (0, "finished")


def test_one_that_cannot_be_started_again_now_is_tried_later(
    start: Start, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(f"listen:{port} sleep:600")
    until(server, lambda: state(tmp_path) == "serving")
    working = server.program.log
    object.__setattr__(server.program, "log", tmp_path / "nowhere" / "teacher.log")
    os.kill(pids(tmp_path)[-1], signal.SIGKILL)
    until(server, lambda: server.num_ends == 2)
    object.__setattr__(server.program, "log", working)
    until(server, lambda: len(pids(tmp_path)) == 2)
    assert "grpo-teacher could not be started: [Errno 2] No such file" in capsys.readouterr().err
