"""What of a ledger must agree with what, as `grpo prove` checks it, and that each disagreement is found."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from grpo.orchestrator.run import orchestrate

from grpo.proofs import prove
from tests.grpo.run_folder import finish, found, gone_pid, grpo, says, write_ledger, write_metrics
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for

FATES = "every rollout has one fate, and dropped ones have a reason"
GROUPS = "a group is one prompt under one version in one step"
HOLES = "steps follow each other without holes"
LAGS = "no rollout is from a later version, or staler than max_off_policy_steps"
ONCE = "an example is trained once an epoch"
METRICS = "each step has one line in metrics.jsonl, with its rollouts and mean reward"
BATCHES = "the batches on disk hold just the rollouts of their step"
TRACES = "the traces on disk show just the trained rollouts of their step"
MOVED = "servers and trainer differ by what the policy has moved"
FINAL = "every rollout is trained or dropped"
STEPS = "every step up to max_steps has rollouts and metrics"
SUMMARY = "the totals and the versions that were sampled under are those of summary.json"
ALL = (FATES, GROUPS, HOLES, LAGS, ONCE, METRICS, BATCHES, TRACES, MOVED, FINAL, STEPS, SUMMARY)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run in which everything agrees."""
    folder = found(tmp_path / "run")
    write_ledger(folder)
    write_metrics(folder)
    finish(folder)
    return folder


def violations(run: Path) -> dict[str, list[str]]:
    [part] = [part for part in prove(run).parts if part.name == "rollouts"]
    return {name: found for name, found in part.facts["checks"].items() if found}


def change(run: Path, statement: str) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as database:
        database.execute(statement)


def test_a_run_in_which_everything_agrees_passes(run: Path) -> None:
    done = grpo("prove", run, "--json")
    assert done.returncode == 0, done.stdout
    [rollouts] = [part for part in json.loads(done.stdout)["parts"] if part["name"] == "rollouts"]
    assert tuple(rollouts["facts"]["checks"]) == ALL


@pytest.mark.parametrize(
    ("statement", "violated"),
    [
        ("UPDATE rollouts SET reason = NULL WHERE id = '4/0'", FATES),
        ("UPDATE rollouts SET reason = 'x' WHERE id = '0/0'", FATES),
        ("UPDATE rollouts SET step = 1 WHERE id = '4/0'", FATES),
        ("UPDATE rollouts SET step = NULL WHERE id = '3/1'", FATES),
        ("UPDATE rollouts SET reward = NULL WHERE id = '3/1'", FATES),
        ("UPDATE rollouts SET changed_at = 0 WHERE id = '3/1'", FATES),
        ("UPDATE rollouts SET example = 9 WHERE id = '0/0'", GROUPS),
        ("UPDATE rollouts SET epoch = 0, example = 1 WHERE step IS NOT NULL", ONCE),
        ("UPDATE rollouts SET step = 2 WHERE id = '0/0'", GROUPS),
        ("UPDATE rollouts SET version = 1 WHERE id = '3/0'", GROUPS),
        ("UPDATE rollouts SET env = 'other' WHERE id = '3/0'", GROUPS),
        ("UPDATE rollouts SET step = 3 WHERE step = 2", HOLES),
        ("UPDATE rollouts SET state = 'shipped' WHERE step = 1", HOLES),
        ("UPDATE rollouts SET state = 'shipped' WHERE id = '0/0'", HOLES),
        ("UPDATE rollouts SET version = 1 WHERE group_id = 0", LAGS),
        ("UPDATE rollouts SET version = -8 WHERE group_id = 3", LAGS),
        ("UPDATE rollouts SET reward = 0.9 WHERE id = '1/1'", METRICS),
        ("DELETE FROM rollouts WHERE id = '2/1'", METRICS),
        ("DELETE FROM rollouts WHERE step = 2", METRICS),
        ("UPDATE rollouts SET state = 'scored', reason = NULL WHERE id = '4/1'", FINAL),
        ("DELETE FROM rollouts WHERE group_id = 4", SUMMARY),
    ],
)
def test_each_disagreement_is_found(run: Path, statement: str, violated: str) -> None:
    change(run, statement)
    assert violated in violations(run)
    assert grpo("prove", run).returncode == 1


def test_a_step_that_is_missing_is_found(run: Path) -> None:
    file = run / "run.json"
    file.write_text(file.read_text().replace('"max_steps": 2', '"max_steps": 3'))
    assert violations(run).keys() == {STEPS}


def test_a_version_that_was_never_proved_and_a_summary_that_is_missing_or_torn_are_found(run: Path) -> None:
    file = run / "summary.json"
    for text in (file.read_text().replace("[0, 1, 2]", "[0, 2]"), '{"rollouts'):
        file.write_text(text)
        assert violations(run).keys() == {SUMMARY}
    file.unlink()
    assert violations(run).keys() == {SUMMARY}


def test_steps_without_metrics_or_with_two_lines_are_found(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines + lines)
    assert violations(run).keys() == {METRICS}
    (run / "metrics.jsonl").write_text("".join(lines.splitlines(keepends=True)[::2]))
    says(run, "orch", "sampling", step=3)  # a run that goes on lacks the newest lines only
    assert violations(run).keys() == {METRICS}
    finish(run)
    (run / "metrics.jsonl").unlink()
    assert violations(run).keys() == {STEPS}


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
    assert violations(run) == {}
    ledger.close()


async def test_what_an_orchestrator_leaves_agrees_with_its_batches(tmp_path: Path) -> None:
    server = await FakeServer(lambda prompt, version: "x").start()
    trainer = FakeTrainer(tmp_path)
    trainer.start()
    await orchestrate(settings_for(tmp_path, server))
    await server.stop()
    trainer.join(60)
    says(tmp_path, "orch", "finished", step=3, pid=gone_pid())
    assert sorted(path.name for path in (tmp_path / "batches").glob("step_*"))[-1] == "step_000003"
    assert violations(tmp_path) == {}
    change(tmp_path, "UPDATE rollouts SET step = 2 WHERE id = (SELECT id FROM rollouts WHERE step = 3)")
    assert len(violations(tmp_path)[BATCHES]) == 2
    (manifest,) = (tmp_path / "batches" / "step_000003").glob("rank_0*")
    manifest.write_bytes(b"torn")
    assert any("batch 3" in violation for violation in violations(tmp_path)[BATCHES])
    traces = tmp_path / "traces"
    shutil.copy(traces / "step_000001.parquet", traces / "step_000002.parquet")
    (traces / "step_000001.parquet").write_bytes(b"torn")
    (traces / "step_000004.parquet").write_bytes(b"of a time before the run went back")
    found = violations(tmp_path)[TRACES]
    assert any("step 2 has rollouts of step 1" in one for one in found)
    assert len([one for one in found if "cannot be read" in one]) == 1
