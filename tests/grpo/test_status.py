"""`grpo status`: what each process does and who waits for whom, from files alone."""

import json
import os
import socket
import sqlite3
from pathlib import Path

import pytest
from grpo.transport.status import process_start

from grpo.commands.status import run_status, text
from grpo.run_files import NoRun, ProgramStatus
from tests.grpo.run_folder import found, gone_pid, grpo, says, write_ledger, write_metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return found(tmp_path / "run")


def test_each_process_has_its_state_step_and_time_and_is_alive(run: Path) -> None:
    says(run, "train", "training", step=3)
    says(run, "train.rank_1", "training", step=3)
    says(run, "orch", "sampling", step=4)
    says(run, "infer.127.0.0.1_8000", "serving", step=2)
    says(run, "infer.127.0.0.1_8001", "loading version 3")
    says(run, "teacher", "serving")
    status = run_status(run)
    assert {process.name: (process.state, process.step) for process in status.processes} == {
        "grpo-infer 127.0.0.1:8000": ("serving", 2),
        "grpo-infer 127.0.0.1:8001": ("loading version 3", None),
        "grpo-orch": ("sampling", 4),
        "grpo-train": ("training", 3),
        "grpo-train rank 1": ("training", 3),
        "grpo-teacher": ("serving", None),
    }
    assert {(process.pid, process.alive) for process in status.processes} == {(os.getpid(), True)}
    assert all(0 <= (process.seconds or 0) < 60 for process in status.processes)
    assert (status.state, status.run_id) == ("running", "5f0c")


def test_the_longest_wait_is_named_first_and_then_who_waits_for_nobody(run: Path) -> None:
    says(run, "orch", "loading version 12", step=14, waiting_for="inference servers: http://a")
    says(run, "train", "waiting", step=13, since=0.0, waiting_for="orchestrator: batch 13")
    says(run, "infer.a_1", "serving", step=11)
    train, orch, infer = run_status(run).waits.split("; ")
    assert train.startswith("grpo-train waits for grpo-orch: batch 13")
    assert orch.startswith("grpo-orch (loading version 12) waits for grpo-infer: http://a")
    assert infer.startswith("grpo-infer a:1 ")


@pytest.mark.parametrize(
    ("name", "said", "state"),
    [
        ("train", {"state": "failed", "message": "ModelError: no such layer"}, "failed"),
        ("train", {"state": "training", "pid": "gone"}, "failed"),
        ("train", {"state": "finished", "pid": "gone"}, "running"),
        ("infer.a_1", {"state": "serving", "pid": "gone"}, "running"),
        ("teacher", {"state": "failed", "pid": "gone"}, "running"),
    ],
)
def test_a_run_has_failed_where_a_program_has_that_it_cannot_do_without(
    run: Path, name: str, said: dict[str, str], state: str
) -> None:
    for other in ("train", "orch"):
        says(run, other, "waiting")
    says(run, name, said["state"], message=said.get("message"), pid=gone_pid() if "pid" in said else None)
    assert run_status(run).state == state
    done = grpo("status", run)
    assert done.returncode == (1 if state == "failed" else 3)
    assert said.get("message", "") in done.stdout


def test_what_the_run_has_come_to_is_read_from_its_folders(run: Path) -> None:
    for name in ("batches/step_000007", "batches/.step_000009.tmp", "broadcasts/step_000006", "batches/received"):
        (run / name).mkdir()
    (run / "broadcasts" / "in_use.json").write_text(
        '{"run_id": "5f0c", "versions": {"4": {"snapshot": "d", "pins": {"evaluation": 1}}}, "newest": 5}'
    )
    for name in ("step_000002/trainer", "step_000004/trainer"):
        (run / "checkpoints" / name).mkdir(parents=True)
    write_metrics(run, torn=True)
    write_ledger(run)
    status = run_status(run)
    assert (status.shipped, status.published, status.live, status.max_steps) == (7, 6, 5, 2)
    assert status.held == {4: "d, pinned by evaluation"}
    assert status.checkpoint == 4
    assert status.rewards == {1: 0.5, 2: 0.3125}
    assert status.rollouts == {"trained": 7, "dropped": 3}


def test_what_pools_keep_on_disk_is_one_line(run: Path) -> None:
    pins = {4: {"pool past": 1}, 5: {"opponents": 1, "pool past": 1}, 6: {"pool past": 1}}
    versions = {str(version): {"snapshot": "d", "pins": by} for version, by in pins.items()}
    in_use = {"run_id": "5f0c", "versions": versions, "newest": 6}
    (run / "broadcasts" / "in_use.json").write_text(json.dumps(in_use))
    shown = text(run_status(run)).splitlines()
    assert [line.split() for line in shown if "kept" in line] == [
        ["versions", "kept", "4,", "6,", "for", "opponents", "(past)"]
    ]
    assert [line.split()[:3] for line in shown if " held " in line] == [["version", "5", "held"]]


@pytest.mark.parametrize("text", ["", "5", '{"state": 5}', '{"state": "a", "since": "now"}', "[" * 10**5])
def test_a_damaged_file_counts_as_missing(run: Path, text: str) -> None:
    write_ledger(run)
    says(run, "orch", "sampling")
    (run / "metrics.jsonl").write_text(f'{text}\n{{"progress/step": 1e999, "reward/mean": 1.0}}\n')
    for name in ("status/train.json", "broadcasts/in_use.json"):
        (run / name).write_text(text)
    status = run_status(run)
    states = {process.name: process.state for process in status.processes}
    assert states == {"grpo-infer": "not started", "grpo-orch": "sampling", "grpo-train": "joined"}
    assert (status.state, status.rewards, status.live) == ("starting", {}, None)
    (run / "ledger.sqlite").write_text(text)
    assert run_status(run).rollouts is None
    (run / "run.json").write_text(text)
    with pytest.raises(NoRun):
        run_status(run)


def test_the_ledger_is_read_while_it_is_written_and_nothing_is_left_behind(run: Path) -> None:
    ledger = write_ledger(run, close=False)
    writer = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM rollouts")
    assert run_status(run).rollouts == {"trained": 7, "dropped": 3}
    writer.execute("COMMIT")
    assert run_status(run).rollouts == {}
    writer.close()
    ledger.close()
    before = sorted(run.rglob("*"))
    run_status(run)
    assert sorted(run.rglob("*")) == before


def test_without_a_run_the_exit_code_is_2(tmp_path: Path) -> None:
    done = grpo("status", tmp_path)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr


def test_json_holds_everything(run: Path) -> None:
    says(run, "train", "waiting", step=1, waiting_for="orchestrator: batch 1")
    fields = json.loads(grpo("status", run, "--json").stdout)
    assert fields["processes"][2]["waiting_for"] == "orchestrator: batch 1"
    assert (fields["run_id"], fields["state"], fields["rollouts"]) == ("5f0c", "starting", None)


def test_a_process_is_known_by_its_start_whatever_the_clock_says() -> None:
    here, pid, started = socket.gethostname(), os.getpid(), process_start(os.getpid())
    assert ProgramStatus(state="", pid=pid, host=here, started=started, since=0.0).alive
    assert ProgramStatus(state="", pid=pid, host=here, started=1).alive is False  # another one has its number now
    assert ProgramStatus(state="", pid=gone_pid(), host=here).alive is False
    assert ProgramStatus(state="", pid=1, host="elsewhere").alive is None
    assert ProgramStatus(state="").alive is None


def test_a_status_folder_that_is_a_file_counts_as_missing(run: Path) -> None:
    (run / "status").rmdir()
    (run / "status").touch()
    assert run_status(run).state == "starting"


@pytest.mark.parametrize(
    ("said", "state", "code"),
    [
        ({"state": "finished"}, "finished", 0),
        ({"state": "failed", "message": "grpo-infer ended with exit code 2: no GPU"}, "failed", 1),
        ({"state": "stopped", "message": "ended by SIGINT; the same command goes on"}, "stopped", 4),
        ({"state": "running", "pid": "gone"}, "failed", 1),
        ({"state": "running"}, "starting", 3),
    ],
)
def test_the_launcher_says_how_a_run_ended_that_had_not_come_to_training(
    tmp_path: Path, said: dict[str, str], state: str, code: int
) -> None:
    run = found(tmp_path / "run", programs={})
    pid = gone_pid() if "pid" in said else None
    says(run, "launcher", said["state"], message=said.get("message"), pid=pid)
    done = grpo("status", run)
    assert (run_status(run).state, done.returncode) == (state, code)
    assert said.get("message", "") in done.stdout


def test_a_run_by_hand_counts_more_than_what_a_launcher_said_before(run: Path) -> None:
    says(run, "launcher", "failed", message="a program ended", since=1.0)
    says(run, "train", "training", step=3)
    says(run, "orch", "sampling", step=4)
    assert run_status(run).state == "running"


def test_programs_by_hand_that_are_told_to_end_have_stopped(run: Path) -> None:
    says(run, "train", "failed", message="SystemExit: 130", pid=gone_pid())
    says(run, "orch", "failed", message="CancelledError", pid=gone_pid())
    assert (run_status(run).state, grpo("status", run).returncode) == ("stopped", 4)


def test_a_finished_run_has_not_failed_though_its_processes_are_gone(run: Path) -> None:
    for name in ("train", "orch"):
        says(run, name, "finished", pid=gone_pid())
    says(run, "infer.a_1", "serving", pid=gone_pid())
    status = run_status(run)
    failed = {process.name: process.failed for process in status.processes}
    assert (status.state, failed["grpo-infer a:1"]) == ("finished", False)
