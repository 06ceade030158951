"""The launcher over small fake programs: what is started again, who is named, what is ended, what is left."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from grpo.deploy.launcher import last_error
from grpo.transport.errors import PROOF_FAILED, START_AGAIN
from grpo.transport.status import AWAY, read_status

from tests.support import runs, until, until_gone

LAUNCHER = Path(__file__).with_name("fake_launcher.py")
SERVE = "sleep:600"


class Run:
    """A launcher process over fake programs, and the processes that noted themselves; `@` is where they do."""

    def __init__(self, folder: Path, *, infer: str = SERVE, train: str = SERVE, orch: str = SERVE, **more: object):
        """`more` are variables of the fake launcher, without FAKE_, in lower case."""
        self.folder, self.pids = folder, folder.parent / "pids"
        steps = [text.replace("@", f"pids:{self.pids}") for text in (infer, train, orch)]
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), str(folder), *steps],
            env=os.environ | {f"FAKE_{name.upper()}": str(value) for name, value in more.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def noted(self, count: int) -> list[int]:
        """The processes that noted themselves, once there are `count`."""

        def noted() -> list[int]:
            return [int(line) for line in self.pids.read_text().split()] if self.pids.exists() else []

        until(lambda: len(noted()) >= count, log=noted)
        return noted()


def gone(pids: Iterable[int]) -> bool:
    return not any(map(runs, pids))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    pids = tmp_path / "pids"
    for line in pids.read_text().split() if pids.exists() else []:
        if runs(int(line)):
            os.kill(int(line), signal.SIGKILL)


def test_a_run_whose_orchestrator_and_trainer_are_done_ends_the_server_and_exits_0(folder: Path) -> None:
    run = Run(folder, infer=f"grandchild @ {SERVE}", train="sleep:1 exit:0", orch="@ exit:0")
    pids = run.noted(3)
    assert run.end() == (0, "")
    assert gone(pids)


def test_a_program_that_fails_is_named_with_its_error_and_the_others_are_ended(folder: Path) -> None:
    mark = folder.parent / "go"
    others = f"grandchild @ {SERVE}"
    run = Run(folder, infer=others, train=f"@ print:error:_it_broke wait:{mark} exit:3", orch=others)
    pids = run.noted(5)
    mark.touch()
    code, errors = run.end()
    assert code == 1
    assert errors.splitlines()[-1] == "error: grpo-train ended with exit code 3: it broke"
    assert gone(pids)


def test_a_proof_that_does_not_hold_ends_the_run_with_its_own_code_and_nothing_is_started_again(folder: Path) -> None:
    code, errors = Run(folder, train=f"@ exit:{PROOF_FAILED}", orch=SERVE).end()
    assert code == PROOF_FAILED
    assert len((folder.parent / "pids").read_text().split()) == 1
    assert "grpo-train" in errors.splitlines()[-1]


@pytest.mark.parametrize("ends", ["exit:1", "kill:SIGKILL"])
def test_a_run_whose_folder_is_removed_says_so(folder: Path, ends: str) -> None:
    mark = folder.parent / "go"
    run = Run(folder, orch=f"@ wait:{mark} {ends}")
    run.noted(1)
    shutil.rmtree(folder)
    mark.touch()
    code, errors = run.end()
    assert code == 1
    assert f"{folder} was removed" in errors.splitlines()[-1]


def test_a_server_that_ends_with_0_before_the_others_is_a_failure(folder: Path) -> None:
    code, errors = Run(folder, infer="exit:0").end()
    assert code == 1
    assert "grpo-infer" in errors.splitlines()[-1]


def test_programs_that_are_killed_or_ask_for_it_are_started_again(folder: Path) -> None:
    mark = folder.parent / "go"
    once = f"@ grandchild:setsid pids:{folder.parent}/pids first:"
    killed, asks = f"{once}kill:SIGKILL", f"{once}exit:{START_AGAIN}"
    run = Run(folder, infer=f"{killed} {SERVE}", train=f"{asks} exit:0", orch=f"{killed} wait:{mark} exit:0")
    pids = run.noted(6 * 3)  # itself, and itself with its grandchild, twice each
    mark.touch()
    code, _ = run.end()
    assert code == 0
    assert gone(pids)


def test_a_program_that_is_away_does_not_look_gone(folder: Path) -> None:
    run = Run(folder, train=f"first:sleep:0 {SERVE}", orch="kill:SIGKILL", restarts=8)
    said = until(lambda: (found := read_status(folder / "status" / "orch.json") or {}).get("state") == AWAY and found)
    assert said["pid"] == run.process.pid
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143


def test_a_program_that_is_killed_again_and_again_fails_the_run(folder: Path) -> None:
    code, errors = Run(folder, train="@ kill:SIGSEGV", restarts=2).end()
    assert code == 1
    assert errors.splitlines()[-1].startswith("error: grpo-train was killed by SIGSEGV")
    assert len((folder.parent / "pids").read_text().split()) == 3


def test_a_signal_is_passed_on_and_decides_the_exit_code(folder: Path) -> None:
    run = Run(folder, infer=f"grandchild @ {SERVE}", train=f"@ {SERVE}", orch=f"@ {SERVE}", grace_s=600)
    pids = run.noted(4)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert gone(pids)


def test_programs_that_ignore_signals_are_killed_in_time_or_by_a_second_signal(folder: Path) -> None:
    deaf, hears = f"deaf @ {SERVE}", folder.parent / "hears"
    run = Run(folder, infer=f"grandchild:setsid {deaf}", train=deaf, orch=f"pids:{hears} @ {SERVE}", grace_s=600)
    pids = set(run.noted(4))
    hearing = {int(hears.read_text())}
    run.process.send_signal(signal.SIGINT)
    until_gone(hearing)
    assert all(map(runs, pids - hearing))
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert gone(pids)
    other = Run(folder, infer=deaf, train=deaf, orch="exit:1", grace_s=1)
    assert other.end()[0] == 1
    assert gone(other.noted(4))


def test_kill_9_of_the_launcher_ends_the_programs(folder: Path) -> None:
    run = Run(folder, infer=f"deaf @ {SERVE}", train=f"deaf @ {SERVE}", orch=f"deaf @ {SERVE}")
    pids = run.noted(3)
    run.process.kill()
    run.end()
    until_gone(pids)
    again = Run(folder, train="exit:0", orch="exit:0")
    assert again.end()[0] == 0


@pytest.mark.parametrize("killed", ["program", "launcher"])
def test_semaphores_of_what_was_killed_are_removed(folder: Path, killed: str) -> None:
    names = folder.parent / "names"
    run = Run(folder, infer=f"semaphore:{names} @ {SERVE}", restarts=0)
    [program] = run.noted(1)
    semaphore = Path("/dev/shm") / f"sem.{names.read_text().strip().removeprefix('/')}"
    assert semaphore.exists()
    os.kill(program if killed == "program" else run.process.pid, signal.SIGKILL)
    run.end()
    until(lambda: not runs(program) and not semaphore.exists())


def test_a_second_launcher_in_the_same_folder_is_refused_while_the_first_one_lasts(folder: Path) -> None:
    first = Run(folder, orch=f"@ {SERVE}")
    first.noted(1)
    assert Run(folder).end()[0] == 1
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130


def test_children_that_the_launcher_had_before_are_left_alone(folder: Path) -> None:
    launcher = f"{sys.executable} {LAUNCHER} {folder} {SERVE} exit:0 exit:0"
    script = f"sleep 600 >/dev/null 2>&1 & echo $! >{folder.parent}/pids; exec {launcher}"
    assert subprocess.run(["sh", "-c", script], capture_output=True, timeout=120).returncode == 0
    assert not gone([int((folder.parent / "pids").read_text())])


def test_the_last_error_says_what_was_raised_in_the_persons_own_code() -> None:
    assert last_error(["a", "error: first", "error: second", "leaked"]) == ": second"
    assert last_error(["killed"]) == ""
    raised = "error: x raised:\nTraceback (most recent call last):\n  File\nKeyError: 'y'\n".splitlines()
    assert last_error(raised) == ": x raised: KeyError: 'y'"


def test_sigusr1_ends_the_trainer_first_and_the_launcher_with_75(folder: Path) -> None:
    run = Run(folder, train=f"usr1:75 @ {SERVE}", infer=f"@ {SERVE}", orch=f"@ {SERVE}")
    run.noted(3)
    run.process.send_signal(signal.SIGUSR1)
    code, _ = run.end()
    assert code == START_AGAIN
    assert gone(run.noted(3))
