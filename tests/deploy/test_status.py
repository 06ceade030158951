"""`grpo status`: what each process does and who waits for whom, from files alone."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.liveness import is_alive
from deploy.restarts import AWAY, keep_restarts
from deploy.status import NoRun, RunStatus, duration, main, run_status, text
from tests.deploy.run_folder import found, gone_pid, says, write_ledger, write_metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return found(tmp_path / "run")


def by_name(status: RunStatus) -> dict[str, str]:
    return {process.name: process.state for process in status.processes}


def test_each_process_has_its_state_step_and_time_and_is_alive(run: Path) -> None:
    says(run, "train", "training", step=3)
    says(run, "orch", "sampling", step=4)
    says(run, "infer.127.0.0.1_8000", "serving", step=2)
    says(run, "infer.127.0.0.1_8001", "loading version 3")
    status = run_status(run)
    assert by_name(status) == {
        "grpo-train": "training",
        "grpo-orch": "sampling",
        "grpo-infer 127.0.0.1:8000": "serving",
        "grpo-infer 127.0.0.1:8001": "loading version 3",
    }
    assert [process.step for process in status.processes] == [3, 4, 2, None]
    assert {(process.pid, process.alive) for process in status.processes} == {(os.getpid(), True)}
    assert all(0 <= (process.seconds or 0) < 60 for process in status.processes)
    assert (status.state, status.exit_code, status.run_id) == ("running", 0, "5f0c")


def test_a_program_that_is_to_be_started_again_does_not_make_the_run_a_failed_one(run: Path) -> None:
    says(run, "train", AWAY, message="it has ended once by itself: was killed by SIGKILL")
    says(run, "orch", "waiting", step=4, waiting_for="trainer: version 3")
    keep_restarts(run / "status", {"train": 1})
    status = run_status(run)
    assert (status.state, status.exit_code, status.restarts) == ("running", 0, {"train": 1})
    assert "; grpo-train has ended, to be started again, for " in status.waits
    assert "  started again      grpo-train once" in text(status)


def test_the_wait_graph_is_one_line_with_the_longest_wait_first(run: Path) -> None:
    says(run, "orch", "loading version 12", step=14, waiting_for="inference servers: http://a, http://b")
    says(run, "train", "waiting", step=13, waiting_for="orchestrator: batch 13")
    path = run / "status" / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"since": time.time() - 1.5}))
    says(run, "infer.a_1", "serving", step=11)
    train, orch, infer = run_status(run).waits.split("; ")
    assert train.startswith("grpo-train waits for grpo-orch: batch 13, for ")
    assert orch.startswith("grpo-orch (loading version 12) waits for grpo-infer: http://a, http://b, for ")
    assert infer.startswith("grpo-infer a:1 is serving in step 11, for ")


def test_a_program_that_has_failed_shows_its_error_and_the_exit_code_is_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says(run, "train", "failed", message="ModelError: no such layer")
    says(run, "orch", "waiting", waiting_for="trainer: version 1")
    assert main([str(run)]) == 1
    shown = capsys.readouterr().out
    assert "grpo-train has failed: ModelError: no such layer" in shown
    assert shown.startswith(f"run 5f0c in {run}: failed\n")


def test_a_program_that_was_told_to_end_says_by_what(run: Path) -> None:
    says(run, "train", "failed", message="SystemExit: 143")
    says(run, "orch", "failed", message="CancelledError")
    assert run_status(run).waits.startswith(
        "grpo-train has failed: ended by SIGTERM; grpo-orch has failed: ended by a signal"
    )


def test_a_process_that_is_gone_without_a_word_makes_the_run_a_failed_one(run: Path) -> None:
    says(run, "train", "training", step=3, pid=gone_pid())
    says(run, "orch", "waiting", waiting_for="trainer: version 3")
    status = run_status(run)
    assert status.exit_code == 1
    assert "grpo-train is gone without a word; it was training in step 3" in status.waits


def test_a_server_that_is_gone_does_not_make_the_run_a_failed_one(run: Path) -> None:
    says(run, "train", "training", step=3)
    says(run, "orch", "sampling", step=4)
    says(run, "infer.a_1", "serving", pid=gone_pid())
    status = run_status(run)
    assert (status.state, status.exit_code) == ("running", 0)
    assert "grpo-infer a:1 is gone without a word" in status.waits


def test_the_server_of_a_teacher_is_there_where_one_is_started_and_its_failure_is_not_the_runs(run: Path) -> None:
    says(run, "train", "training", step=3)
    says(run, "orch", "scoring", step=4, waiting_for="the teacher big at http://127.0.0.1:9")
    assert "grpo-teacher" not in by_name(run_status(run))
    says(run, "teacher", "ended, to be started again", message="it has ended once by itself: was killed by SIGKILL")
    status = run_status(run)
    assert by_name(status)["grpo-teacher"] == "ended, to be started again"
    assert "to be started again: it has ended once by itself: was killed by SIGKILL" in text(status)
    says(run, "teacher", "failed", message="ended with exit code 1", pid=gone_pid())
    assert (run_status(run).state, run_status(run).exit_code) == ("running", 0)


def test_a_finished_run_is_not_a_failed_one_though_its_processes_are_gone(run: Path) -> None:
    for name in ("train", "orch", "infer.a_1"):
        says(run, name, "finished", pid=gone_pid())
    status = run_status(run)
    assert (status.state, status.exit_code) == ("finished", 0)
    assert status.waits == "nobody waits: all have finished"


def test_what_the_run_has_come_to_is_read_from_its_folders(run: Path) -> None:
    for name in ("batches/step_000007", "batches/.step_000009.tmp", "broadcasts/step_000006", "batches/acks"):
        (run / name).mkdir()
    (run / "broadcasts" / "in_use.json").write_text('{"run_id": "5f0c", "versions": [4], "newest": 5}')
    for name in ("step_000002/trainer", "step_000002/orchestrator", "step_000004/trainer"):
        (run / "checkpoints" / name).mkdir(parents=True)
    (run / "checkpoints/step_000002/COMPLETE").touch()
    write_metrics(run, torn=True)
    write_ledger(run)
    status = run_status(run)
    assert (status.shipped, status.published, status.live, status.max_steps) == (7, 6, 5, 2)
    assert status.checkpoint == {"trainer": 4, "orchestrator": 2, "complete": 2}
    assert status.rewards == {1: 0.5, 2: 0.3125}
    assert status.rollouts == {"trained": 7, "dropped": 3}
    assert "rewards            1: 0.500  2: 0.312" in text(status)


def test_batches_that_travel_by_network_are_counted_by_the_ledger(run: Path) -> None:
    write_ledger(run)
    assert run_status(run).shipped == 2


def test_missing_and_torn_files_are_left_out(run: Path) -> None:
    (run / "status" / "train.json").write_text('{"state": "trai')
    (run / "broadcasts" / "in_use.json").write_text("{")
    (run / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n[1]\n")
    (run / "status" / "orch.json").write_text("[]")
    status = run_status(run)
    assert by_name(status) == {"grpo-train": "joined", "grpo-orch": "joined", "grpo-infer": "not started"}
    assert (status.state, status.rollouts, status.rewards, status.live) == ("starting", None, {}, None)
    assert "rollouts           not counted" in text(status)


def test_the_ledger_is_read_while_it_is_written(run: Path) -> None:
    ledger = write_ledger(run, close=False)
    writer = sqlite3.connect(run / "ledger.sqlite", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM rollouts")
    assert run_status(run).rollouts == {"trained": 7, "dropped": 3}
    writer.execute("COMMIT")
    assert run_status(run).rollouts == {}
    writer.close()
    ledger.close()


def test_looking_leaves_nothing_behind(run: Path) -> None:
    write_ledger(run)
    before = sorted(run.rglob("*"))
    run_status(run)
    assert sorted(run.rglob("*")) == before


def test_without_a_run_the_folder_is_named_and_the_exit_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2
    assert f"{tmp_path} holds no run: it has no run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(NoRun, match="cannot be read"):
        run_status(tmp_path)


def test_json_holds_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says(run, "train", "waiting", step=1, waiting_for="orchestrator: batch 1")
    assert main([str(run), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["processes"][0]["waiting_for"] == "orchestrator: batch 1"
    assert fields["waits"].startswith("grpo-train waits for grpo-orch: batch 1, for ")
    assert (fields["run_id"], fields["state"], fields["rollouts"]) == ("5f0c", "starting", None)


def test_a_number_that_another_process_has_got_is_not_taken_for_the_old_one() -> None:
    here = socket.gethostname()
    assert is_alive(os.getpid(), here, since=time.time())
    assert is_alive(os.getpid(), here, since=time.time() - 1e6) is False
    assert is_alive(gone_pid(), here, since=time.time()) is False
    assert is_alive(1, "elsewhere", since=time.time()) is None
    assert is_alive(None, here, since=None) is None


def test_durations_are_easy_to_read() -> None:
    assert [duration(s) for s in (4.24, 192, 18_200)] == ["4.2 s", "3 min 12 s", "5 h 3 min"]


def test_the_command_imports_nothing_heavy(run: Path) -> None:
    code = (
        "import sys; from deploy.cli import main; sys.argv = ['grpo', 'status', sys.argv[1]]\n"
        "heavy = {'torch', 'vllm', 'transformers', 'pydantic'}\n"
        "try: main()\nexcept SystemExit: print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
