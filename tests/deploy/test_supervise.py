"""The launcher over small fake programs: who is blamed, what is ended, what is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deploy import kept, supervise
from deploy.kept import Kept
from deploy.launcher import explain
from deploy.processes import Again, Program
from deploy.restarts import AWAY
from deploy.supervise import Signals
from grpo.status import run_status
from transport.folders import step_folder
from transport.status import read_status

LAUNCHER = Path(__file__).with_name("fake_launcher.py")
FAKE = Path(__file__).with_name("fake_program.py")
SERVE = "sleep:600"


class Run:
    """A launcher process over fake programs, and the processes that were seen below it."""

    def __init__(
        self,
        folder: Path,
        *,
        infer: str,
        train: str,
        orch: str,
        teacher: str | None = None,
        port: int = 0,
        max_steps: int = 0,
        grace_s: float = supervise.GRACE_S,
        **more: object,
    ) -> None:
        """`more` are further variables of the fake launcher, without FAKE_, in lower case."""
        self.folder, self.pids = folder, folder.parent / "pids"
        noted = f" pids:{self.pids} "
        programs = [text.replace("@", noted) for text in (infer, train, orch, teacher) if text is not None]
        steps = [text.replace("status:", f"status:{folder}/status/") for text in programs]
        variables = {f"FAKE_{name.upper()}": str(value) for name, value in more.items()}
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), str(folder), str(max_steps), *steps],
            env=os.environ | {"FAKE_GRACE_S": str(grace_s), "FAKE_PORT": str(port)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def noted_pids(self, count: int) -> list[int]:
        """The processes that noted themselves, once there are `count`."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pids = [int(line) for line in self.pids.read_text().split()] if self.pids.exists() else []
            if len(pids) >= count:
                return pids
            time.sleep(0.02)
        raise AssertionError(f"fewer than {count} processes noted themselves: {pids}")


def gone(pids: list[int], within_s: float = 0.0) -> bool:
    """Whether none of the processes lives, now or in a while."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            print("alive:", alive)
            return False
        time.sleep(0.05)
    return True


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_state(folder: Path, state: str, role: str = "teacher") -> None:
    """Until the program's status file says so."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (read_status(folder / "status" / f"{role}.json") or {}).get("state") == state:
            return
        time.sleep(0.02)
    raise AssertionError(f"grpo-{role} was not {state!r} within 60 s")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    pids = tmp_path / "pids"
    for line in pids.read_text().split() if pids.exists() else []:
        if _alive(int(line)):
            os.kill(int(line), signal.SIGKILL)


def test_a_run_whose_orchestrator_and_trainer_end_well_ends_the_server_and_exits_0(folder: Path) -> None:
    mark = folder.parent / "go"
    run = Run(folder, infer=f"grandchild @ {SERVE}", train="@ exit:0", orch=f"@ wait:{mark} exit:0")
    pids = run.noted_pids(4)
    mark.touch()
    code, errors = run.end()
    assert (code, errors) == (0, "")
    assert gone(pids)


def test_a_trainer_may_end_after_the_orchestrator(folder: Path) -> None:
    code, errors = Run(folder, infer=SERVE, train="sleep:1 exit:0", orch="exit:0").end()
    assert (code, errors) == (0, "")


@pytest.mark.parametrize("role", ["infer", "train", "orch"])
def test_one_program_that_fails_is_blamed_and_the_others_are_ended(folder: Path, role: str) -> None:
    steps = dict.fromkeys(("infer", "train", "orch"), f"grandchild @ {SERVE}")
    mark = folder.parent / "go"
    steps[role] = f"@ print:it-broke wait:{mark} exit:3"
    run = Run(folder, **steps)
    pids = run.noted_pids(5)
    mark.touch()
    code, errors = run.end()
    assert code == 1
    assert f"error: grpo-{role} ended with exit code 3; the other programs were ended" in errors.splitlines()
    assert f"last lines of {folder}/logs/{role}.log:\n  | it-broke\n" in errors
    assert gone(pids)


def test_a_server_that_ends_early_is_a_failure_even_with_exit_code_0(folder: Path) -> None:
    code, errors = Run(folder, infer="exit:0", train=SERVE, orch=SERVE).end()
    assert code == 1
    assert "error: grpo-infer ended with exit code 0" in errors


def test_a_trainer_that_ends_before_its_last_step_is_a_failure(folder: Path) -> None:
    code, errors = Run(folder, infer=SERVE, train="exit:0", orch=SERVE, max_steps=5).end()
    assert code == 1
    assert "error: grpo-train ended with exit code 0 before its last step" in errors


def test_a_trainer_that_ends_after_its_last_step_is_waited_for_no_longer(folder: Path) -> None:
    run = Run(
        folder, infer=SERVE, train="wait:go exit:0".replace("go", f"{folder}/go"), orch="sleep:2 exit:0", max_steps=5
    )
    while not (folder / "broadcasts").exists():
        time.sleep(0.02)
    step_folder(folder / "broadcasts", 5).mkdir()
    (folder / "go").touch()
    assert run.end() == (0, "")


def test_a_teacher_that_is_killed_is_started_again_and_the_run_goes_on(folder: Path, free_port: int) -> None:
    mark, teacher = folder.parent / "go", f"@ listen:{free_port} print:serving {SERVE}"
    run = Run(folder, infer=SERVE, train="exit:0", orch=f"wait:{mark} exit:0", teacher=teacher, port=free_port)
    [first] = run.noted_pids(1)
    wait_for_state(folder, "serving")
    os.kill(first, signal.SIGKILL)
    _, second = run.noted_pids(2)
    wait_for_state(folder, "serving")
    assert run.process.poll() is None
    mark.touch()
    code, errors = run.end()
    assert code == 0
    log = folder / "logs" / "teacher.log"
    assert errors.splitlines() == [
        f"grpo-teacher was killed by SIGKILL; the run goes on, and it is started again in 1 s; its log is {log}",
        "grpo-teacher serves again",
    ]
    assert log.read_text() == "serving\nserving\n"
    assert gone([first, second])


def test_a_teacher_that_never_answered_fails_the_run(folder: Path, free_port: int) -> None:
    steps = f"@ {SERVE}"
    mark = folder.parent / "go"
    teacher = f"print:no-model wait:{mark} exit:1"
    run = Run(folder, infer=steps, train=steps, orch=steps, teacher=teacher, port=free_port)
    pids = run.noted_pids(3)
    mark.touch()
    code, errors = run.end()
    assert code == 1
    assert "error: grpo-teacher ended with exit code 1; the other programs were ended" in errors
    assert f"last lines of {folder}/logs/teacher.log:\n  | no-model\n" in errors
    assert gone(pids)


def test_a_teacher_that_waits_to_be_started_again_does_not_hold_the_end_up(folder: Path, free_port: int) -> None:
    teacher = f"@ listen:{free_port} {SERVE}"
    run = Run(folder, infer=SERVE, train=SERVE, orch=SERVE, teacher=teacher, port=free_port, grace_s=600, pause_s=600)
    [pid] = run.noted_pids(1)
    wait_for_state(folder, "serving")
    os.kill(pid, signal.SIGKILL)
    wait_for_state(folder, "ended, to be started again")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    assert run.noted_pids(1) == [pid]


# --- programs that are started again ---

TRAINS, SAMPLES = f"status:train.json:training:3 {SERVE}", f"status:orch.json:sampling:3 {SERVE}"


def kill(folder: Path, role: str) -> None:
    """The program that its status file names, once it is at work."""
    wait_for_state(folder, {"train": "training", "orch": "sampling"}[role], role)
    os.kill((read_status(folder / "status" / f"{role}.json") or {})["pid"], signal.SIGKILL)


def test_trainer_and_orchestrator_that_are_killed_at_once_are_started_again_and_the_run_ends_well(
    folder: Path,
) -> None:
    mark, end = folder.parent / "go", folder.parent / "end"
    second = f"wait:{end} exit:0"
    train = f"@ status:train.json:training:3 wait:{mark} {second}"
    orch = f"@ status:orch.json:sampling:3 wait:{mark} {second}"
    run = Run(folder, infer=SERVE, train=train, orch=orch, max_steps=5, pause_s=0.1)
    wait_for_state(folder, "sampling", "orch")
    step_folder(folder / "batches", 1).mkdir(parents=True)
    for role in ("train", "orch"):
        kill(folder, role)
    mark.touch()
    pids = run.noted_pids(4)
    for role in ("train", "orch"):
        wait_for_state(folder, {"train": "training", "orch": "sampling"}[role], role)
    assert run_status(folder).restarts == {"train": 1, "orch": 1}
    assert run.process.poll() is None
    step_folder(folder / "broadcasts", 5).mkdir()
    end.touch()
    output, errors = run.process.communicate(timeout=60)
    assert run.process.returncode == 0, errors
    again = "was killed by SIGKILL; the run goes on, and it is started again in 0.1 s (1 of 3)"
    assert f"grpo-train {again}, from version 0: there is no checkpoint yet; its log is" in errors
    assert f"grpo-orch {again}, after the newest batch; its log is" in errors
    overruled = "started again with --ckpt.resume_step=-1 --ckpt.skip_progress=false"
    assert overruled in (folder / "logs" / "orch.log").read_text()
    assert "ended by themselves and were started again: grpo-train once, grpo-orch once" in output.splitlines()
    assert gone(pids)


def test_a_server_that_is_killed_is_started_again_and_one_that_is_away_at_the_end_is_not(
    folder: Path, free_port: int
) -> None:
    mark, infer = folder.parent / "go", f"listen:{free_port} accept @ {SERVE}"
    run = Run(folder, infer=infer, train="exit:0", orch=f"wait:{mark} exit:0", infer_port=free_port, pause_s=0.1)
    [first] = run.noted_pids(1)
    os.kill(first, signal.SIGKILL)
    _, second = run.noted_pids(2)
    assert run.process.poll() is None
    os.kill(second, signal.SIGKILL)
    mark.touch()
    code, errors = run.end()
    assert code == 0, errors
    assert "grpo-infer serves again" in errors.splitlines()


@pytest.mark.parametrize(("restarts", "how"), [(0, ""), (2, ", after it had been started again 2 times")])
def test_a_program_that_is_killed_once_too_often_ends_the_run_and_is_blamed(
    folder: Path, restarts: int, how: str
) -> None:
    train = "status:train.json:training:3 sleep:0.3 kill:SIGKILL"
    code, errors = Run(folder, infer=SERVE, train=train, orch=SERVE, max_steps=5, restarts=restarts, pause_s=0.1).end()
    assert code == 1
    assert f"error: grpo-train was killed by SIGKILL{how}; the other programs were ended" in errors.splitlines()
    assert errors.count("started again in") == restarts


@pytest.fixture
def together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Kept]]:
    """Starts fake programs here, without a launcher, which are started again without a pause."""
    monkeypatch.setattr(kept, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(supervise, "SETTLE_S", 0.5)
    started: list[Kept] = []
    with (tmp_path / "lock").open("w") as lock:

        def begin(role: str, steps: str) -> Kept:
            steps = steps.replace("status:", f"status:{tmp_path}/")
            program = Program(
                role=role,
                command=(sys.executable, "-I", "-S", str(FAKE), *steps.split()),
                log=tmp_path / f"{role}.log",
                environment=dict(os.environ),
                again=Again(limit=3),
            )
            started.append(Kept(program, lock=lock.fileno(), status=tmp_path / f"{role}.json"))
            return started[-1]

        yield begin
        for program in started:
            program.kill()
            program.close()


def test_a_program_that_is_killed_is_blamed_before_one_that_failed_in_consequence_and_was_seen_earlier(
    tmp_path: Path, together: Callable[[str, str], Kept], capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "go"
    infer, orch = together("infer", f"wait:{mark} kill:SIGKILL"), together("orch", "print:no-server exit:1")
    children = {"infer": infer, "train": together("train", SERVE), "orch": orch}

    def end_infer() -> None:
        """Within one look, once the other's end was seen."""
        if orch.exit is not None and not mark.exists():
            mark.touch()
            os.waitid(os.P_PID, infer.pid, os.WEXITED | os.WNOWAIT)

    outcome = supervise.supervise(children, signals=Signals(), tick=end_infer, trainer_is_done=lambda: False)
    explain(outcome)
    errors = capsys.readouterr().err
    assert outcome.exit_code == 1
    assert "error: grpo-infer was killed by SIGKILL; then grpo-orch ended with exit code 1" in errors
    assert "no-server" in errors


def test_one_that_was_killed_is_blamed_before_one_that_failed_while_it_was_away(
    together: Callable[[str, str], Kept], capsys: pytest.CaptureFixture[str]
) -> None:
    train = together("train", "status:train.json:training:3 kill:SIGKILL")
    children = {"infer": together("infer", SERVE), "train": train, "orch": together("orch", "exit:1")}
    os.waitid(os.P_PID, children["orch"].pid, os.WEXITED | os.WNOWAIT)  # both have ended before anybody looks
    os.waitid(os.P_PID, train.pid, os.WEXITED | os.WNOWAIT)
    outcome = supervise.supervise(children, signals=Signals(), tick=lambda: None, trainer_is_done=lambda: False)
    blamed = [(failure.child.program.role, failure.how) for failure in outcome.failures]
    assert blamed == [("train", "was killed by SIGKILL"), ("orch", "ended with exit code 1")]
    assert "works again" not in capsys.readouterr().err
    assert train.num_ends == 1


def test_one_that_is_killed_while_the_programs_end_is_not_started_again(folder: Path) -> None:
    deaf = f"deaf @ status:train.json:training:3 {SERVE}"
    run = Run(folder, infer=SERVE, train=deaf, orch=SERVE, max_steps=5, grace_s=600, pause_s=0)
    [pid] = run.noted_pids(1)
    wait_for_state(folder, "training", "train")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.stderr is not None
    assert run.process.stderr.readline() == "SIGTERM: ending the programs; once more kills them\n"
    os.kill(pid, signal.SIGKILL)
    assert run.end() == (143, "ended by SIGTERM\n")
    assert run.noted_pids(1) == [pid]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_of_the_launcher_while_programs_are_away_leaves_nothing_and_no_finished_run(
    folder: Path, number: signal.Signals
) -> None:
    run = Run(folder, infer=f"@ {SERVE}", train=f"@ {TRAINS}", orch=f"grandchild @ {SAMPLES}", max_steps=5, pause_s=60)
    pids = run.noted_pids(4)
    for role in ("train", "orch"):
        kill(folder, role)
        wait_for_state(folder, AWAY, role)
    run.process.send_signal(number)
    run.end()
    assert gone(pids, within_s=60)
    assert run_status(folder).state == "failed"
    if number == signal.SIGINT:
        assert run.process.returncode == 130


def test_a_trainer_that_is_killed_after_its_last_version_has_done_its_work(folder: Path) -> None:
    mark = folder.parent / "go"
    orch = f"wait:{mark} sleep:0.5 status:orch.json:finished:5 exit:0"
    run = Run(folder, infer=SERVE, train=TRAINS, orch=orch, max_steps=5)
    wait_for_state(folder, "training", "train")
    step_folder(folder / "broadcasts", 5).mkdir()
    kill(folder, "train")
    mark.touch()
    assert run.end() == (0, "grpo-train was killed by SIGKILL when its work was done\n")
    status = run_status(folder)
    assert (status.state, status.processes[2].step) == ("finished", 3)


def test_one_whose_guard_is_killed_is_started_again_when_what_it_left_is_gone(folder: Path) -> None:
    run = Run(folder, infer=SERVE, train=f"grandchild:setsid @ {TRAINS}", orch=SERVE, max_steps=5, pause_s=0.1)
    left = run.noted_pids(2)
    wait_for_state(folder, "training", "train")
    guard = psutil.Process(left[0]).ppid()
    os.kill(guard, signal.SIGKILL)
    run.noted_pids(4)
    assert gone(left)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert gone(run.noted_pids(4))


# --- ends ---


def test_programs_that_ignore_signals_are_killed_within_20_s(folder: Path) -> None:
    assert supervise.SETTLE_S + supervise.GRACE_S + supervise.KILL_S < 20
    deaf = f"deaf grandchild:setsid @ {SERVE}"
    mark = folder.parent / "go"
    run = Run(folder, infer=f"deaf @ {SERVE}", train=deaf, orch=f"@ wait:{mark} exit:1", grace_s=1)
    pids = run.noted_pids(4)
    mark.touch()
    code, errors = run.end()
    assert code == 1
    assert "grpo-orch" in errors
    assert gone(pids)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_decides_the_exit_code(folder: Path, number: signal.Signals, expected: int) -> None:
    run = Run(folder, infer=f"grandchild @ {SERVE}", train=f"@ {SERVE}", orch=f"@ {SERVE}", grace_s=600)
    pids = run.noted_pids(4)
    run.process.send_signal(number)
    code, errors = run.end()
    assert code == expected
    assert errors.splitlines() == [
        f"{number.name}: ending the programs; once more kills them",
        f"ended by {number.name}",
    ]
    assert gone(pids)


def test_a_second_ctrl_c_kills(folder: Path) -> None:
    deaf = f"deaf @ {SERVE}"
    run = Run(folder, infer=f"deaf grandchild @ {SERVE}", train=deaf, orch=deaf, grace_s=600)
    pids = run.noted_pids(4)
    run.process.send_signal(signal.SIGINT)
    assert run.process.stderr is not None
    assert run.process.stderr.readline() == "SIGINT: ending the programs; once more kills them\n"
    time.sleep(0.5)
    assert not gone(pids)
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 130
    assert gone(pids)


def test_kill_9_of_the_launcher_leaves_nothing_not_even_grandchildren(folder: Path) -> None:
    serve = f"grandchild grandchild:setsid @ {SERVE}"
    run = Run(folder, infer=serve, train=serve, orch=f"deaf {serve}")
    pids = run.noted_pids(9)
    guards = [child.pid for child in psutil.Process(run.process.pid).children()]
    run.process.kill()
    run.end()
    assert gone(pids + guards, within_s=60)


def test_kill_9_of_a_guard_leaves_nothing_either(folder: Path) -> None:
    serve = f"grandchild grandchild:setsid @ {SERVE}"
    run = Run(folder, infer=serve, train=serve, orch=serve)
    pids = run.noted_pids(9)
    train_guard = next(
        child.pid
        for child in psutil.Process(run.process.pid).children()
        if "/train.log" in str(Path(f"/proc/{child.pid}/fd/1").readlink())
    )
    os.kill(train_guard, signal.SIGKILL)
    code, errors = run.end()
    assert code == 1
    assert "error: grpo-train was killed by SIGKILL" in errors
    assert gone(pids)


def test_kill_9_of_launcher_and_guards_together_ends_the_programs(folder: Path) -> None:
    run = Run(folder, infer=f"deaf @ {SERVE}", train=f"deaf @ {SERVE}", orch=f"deaf @ {SERVE}")
    pids = run.noted_pids(3)
    launcher = psutil.Process(run.process.pid)
    for process in [*launcher.children(), launcher]:
        process.kill()
    run.end()
    assert gone(pids, within_s=60)


def test_what_a_program_leaves_behind_is_ended_with_it(folder: Path) -> None:
    mark = folder.parent / "go"
    run = Run(folder, infer=SERVE, train="grandchild grandchild:setsid @ exit:0", orch=f"wait:{mark} exit:0")
    pids = run.noted_pids(3)
    assert gone(pids, within_s=60)
    mark.touch()
    assert run.end()[0] == 0


@pytest.mark.parametrize("killed", ["program", "launcher"])
def test_semaphores_of_what_was_killed_are_removed(folder: Path, killed: str) -> None:
    names = folder.parent / "names"
    run = Run(folder, infer=f"semaphore:{names} @ {SERVE}", train=SERVE, orch=SERVE)
    [program] = run.noted_pids(1)
    semaphore = Path("/dev/shm") / f"sem.{names.read_text().strip().removeprefix('/')}"
    assert semaphore.exists()
    if killed == "program":
        os.kill(program, signal.SIGKILL)
    else:
        run.process.kill()
    run.end()
    assert gone([program], within_s=60)
    deadline = time.monotonic() + 60
    while semaphore.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_lasts(folder: Path) -> None:
    first = Run(folder, infer=f"@ {SERVE}", train=f"@ {SERVE}", orch=f"@ {SERVE}")
    first.noted_pids(3)
    second = Run(folder, infer=SERVE, train=SERVE, orch=SERVE)
    code, errors = second.end()
    assert code == 1
    assert f"output_dir {folder} is in use by grpo with process id {first.process.pid}" in errors
    first.process.send_signal(signal.SIGINT)
    assert first.end()[0] == 130


def test_a_program_that_cannot_be_started_is_blamed(folder: Path, tmp_path: Path) -> None:
    code, errors = Run(folder, infer="no-such-step", train=SERVE, orch=SERVE).end()
    assert code == 1
    assert "fake program: unknown step 'no-such-step'" in errors


def test_children_that_the_launcher_had_before_are_left_alone(folder: Path) -> None:
    launcher = f"{sys.executable} {LAUNCHER} {folder} 0 {SERVE} exit:0 exit:0"
    script = f"sleep 600 >/dev/null 2>&1 & echo $! >{folder.parent}/pids; exec {launcher}"
    assert subprocess.run(["sh", "-c", script], capture_output=True, timeout=120).returncode == 0
    assert not gone([int((folder.parent / "pids").read_text())])
