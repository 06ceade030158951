"""`grpo ledger --check`: what must agree, and that each disagreement is found."""

import json
import sqlite3
from pathlib import Path

import pytest

from deploy.ledger_check import check
from deploy.ledger_view import main, open_ledger
from orchestrator.loop import orchestrate
from tests.deploy.run_folder import finish, found, gone_pid, says, write_ledger, write_metrics
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run in which everything agrees."""
    folder = found(tmp_path / "run")
    write_ledger(folder)
    write_metrics(folder)
    finish(folder)
    return folder


def violations(run: Path) -> list[str]:
    with open_ledger(run) as database:
        return [violation for one in check(run, database) for violation in one.violations]


def change(run: Path, statement: str) -> None:
    database = sqlite3.connect(run / "ledger.sqlite")
    database.execute(statement)
    database.commit()
    database.close()


def test_a_run_in_which_everything_agrees_passes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--check"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("all 11 checks hold\n")
    assert "VIOLATED" not in shown


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("UPDATE rollouts SET state = 'lost' WHERE id = '0/0'", "rollout 0/0 (lost) is in an unknown state"),
        ("UPDATE rollouts SET reason = NULL WHERE id = '4/0'", "rollout 4/0 (dropped) is dropped without a reason"),
        ("UPDATE rollouts SET reason = 'x' WHERE id = '0/0'", "rollout 0/0 (trained) has a reason but is not dropped"),
        ("UPDATE rollouts SET step = 1 WHERE id = '4/0'", "rollout 4/0 (dropped) names a step, but is in no batch"),
        ("UPDATE rollouts SET step = NULL WHERE id = '3/1'", "3/1 (trained) is in a batch, but no step is named"),
        ("UPDATE rollouts SET group_id = 1 WHERE id = '0/0'", "rollout 0/0 is filed under group 1"),
        ("UPDATE rollouts SET example = 9 WHERE id = '0/0'", "group 0 has more than one example"),
        ("UPDATE rollouts SET step = 2 WHERE id = '0/0'", "group 0 is in steps "),
        ("UPDATE rollouts SET step = 3 WHERE step = 2", "no rollout is in step 2, and step 3 is there"),
        ("UPDATE rollouts SET state = 'shipped' WHERE step = 1", "step 1 is not trained whole, and step 2 is"),
        ("UPDATE rollouts SET version = 1 WHERE group_id = 0", "0/0 of step 1 was sampled under version 1, which came"),
        ("UPDATE rollouts SET version = -8 WHERE group_id = 3", "has lag 9, more than max_off_policy_steps = 8"),
        ("UPDATE rollouts SET reward = 0.9 WHERE id = '1/1'", "step 1 has a mean reward of 0.6, its metrics say 0.5"),
        ("DELETE FROM rollouts WHERE id = '2/1'", "step 2 has 3 scored rollouts, its metrics say 4"),
        ("DELETE FROM rollouts WHERE step = 2", "step 2 has metrics, but no rollout is in it"),
        ("UPDATE rollouts SET state = 'scored', reason = NULL WHERE id = '4/1'", "4/1 is scored, and the run is over"),
        ("DELETE FROM rollouts WHERE group_id = 4", "rollouts_issued is 8, the summary says 10"),
    ],
)
def test_each_disagreement_is_found(run: Path, statement: str, expected: str) -> None:
    change(run, statement)
    assert any(expected in violation for violation in violations(run)), violations(run)
    assert main([str(run), "--check"]) == 1


def test_a_last_step_that_is_missing_is_found(run: Path) -> None:
    fields = json.loads((run / "run.json").read_text())
    fields["programs"]["orch"]["settings"]["max_steps"] = 3
    (run / "run.json").write_text(json.dumps(fields))
    assert violations(run) == ["the last step is 2, expected max_steps = 3"]


def test_a_version_that_was_sampled_under_and_never_proved_is_found(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text()) | {"versions_served": [0, 2]}
    (run / "summary.json").write_text(json.dumps(summary))
    assert violations(run) == [
        "version 1 is not in versions_served of summary.json, and 1 of the trained rollouts were sampled under it"
    ]


def test_steps_without_metrics_are_found(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    assert violations(run) == ["step 1 has no metrics", "step 2 has no metrics"]


def test_the_newest_metrics_of_a_step_count(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text()
    earlier = json.dumps({"progress/step": 2.0, "reward/mean": 0.9, "rollout/num": 4.0})
    (run / "metrics.jsonl").write_text(f"{earlier}\n{lines}")
    assert violations(run) == []


def test_a_run_that_goes_on_may_have_open_ends(tmp_path: Path) -> None:
    run = found(tmp_path / "run")
    ledger = write_ledger(run, close=False)
    write_metrics(run)
    says(run, "orch", "sampling", step=3)
    ledger.issued(5, num=2, env="reverse-text", example=1, version=2)
    ledger.issued(6, num=2, env="reverse-text", example=2, version=2)
    for number in range(2):
        ledger.scored(f"6/{number}", reward=1.0, num_tokens=3)
    ledger.shipping(["6/0", "6/1"], 3, state={}, metrics={})()
    assert violations(run) == []
    ledger.close()


def test_many_violations_of_a_kind_are_counted(run: Path) -> None:
    numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 19) "
    row = "'9/' || i, 9, 'e', 0, 0, 'odd', NULL, NULL, NULL, NULL, 0, 0"
    change(run, f"{numbers} INSERT INTO rollouts SELECT {row} FROM n")
    found = [violation for violation in violations(run) if "unknown state" in violation or "more" in violation]
    assert len(found) == 11
    assert found[-1] == "and 10 more"


async def test_what_an_orchestrator_leaves_agrees_with_its_batches(tmp_path: Path) -> None:
    server = await FakeServer(lambda prompt, version: "x").start()
    trainer = FakeTrainer(tmp_path)
    trainer.start()
    await orchestrate(settings_for(tmp_path, server))
    await server.stop()
    trainer.join(10)
    says(tmp_path, "orch", "finished", step=3, pid=gone_pid())
    assert sorted(path.name for path in (tmp_path / "batches").glob("step_*"))[-1] == "step_000003"
    assert violations(tmp_path) == []
    change(tmp_path, "UPDATE rollouts SET step = 2 WHERE id = (SELECT id FROM rollouts WHERE step = 3)")
    found = [violation for violation in violations(tmp_path) if "batch" in violation]
    assert len(found) == 2
    assert "is in step 2 of the ledger, but not in its batch" in found[0]
    assert "is in the batch of step 3, but not in that step of the ledger" in found[1]
    (manifest,) = (tmp_path / "batches" / "step_000003").glob("rank_0*")
    manifest.write_bytes(b"torn")
    assert any("batch 3 cannot be read" in violation for violation in violations(tmp_path))


def test_json_names_each_check(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, "UPDATE rollouts SET state = 'lost' WHERE id = '4/0'")
    assert main([str(run), "--check", "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)
    assert len(fields["checks"]) == 11
    assert fields["violated"] > 0
