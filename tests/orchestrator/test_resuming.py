"""Orchestrators that go on with a run, against a server and a trainer that are stand-ins."""

import json
import shutil
import sqlite3
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grpo.configs.errors import SettingsError
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.summary import Summary
from grpo.orchestrator.resuming import resume
from grpo.orchestrator.run import orchestrate
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.errors import DeadlineError, RunFolderError
from grpo.transport.folders import step_folder
from grpo.transport.run import RunFolder, code_changes, current_run_id, only_one

from grpo.run_files import read_run
from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.running import lines_of, rows_of, run

GROUPS, SIZE = 4, 16


async def go(folder: Path, server: FakeServer, *, after: int | None = None, **changes: Any) -> Summary:
    """A run, or more of it, with a trainer that has trained the steps up to `after`."""
    return (await run(folder, server, trainer={"goes_on_after": after}, **changes)).summary


def examples(folder: Path) -> list[int]:
    """What was asked, in order."""
    return [row[0] for row in rows_of(folder, "SELECT example FROM rollouts GROUP BY group_id ORDER BY group_id")]


def steps_of(folder: Path) -> list[float]:
    """The steps of whose batches there are metrics."""
    return [line["progress/step"] for line in lines_of(folder) if "reward/mean" in line]


async def test_a_finished_run_given_more_steps_asks_on_where_it_stood(tmp_path: Path, server: FakeServer) -> None:
    whole = await go(tmp_path / "whole", server, max_steps=5)
    await go(tmp_path / "parts", server, max_steps=3)
    summary = await go(tmp_path / "parts", server, after=3, max_steps=5)
    assert examples(tmp_path / "parts") == examples(tmp_path / "whole")
    assert summary.rollouts_trained == summary.rollouts_issued == whole.rollouts_trained == 5 * SIZE
    assert summary.versions_served == (0, 1, 2, 3, 4, 5)
    assert set(summary.accuracies) == {"0", "3", "5"}
    assert summary.seconds["train"] == whole.seconds["train"]
    assert summary.tokens["generate"] == whole.tokens["generate"]
    assert steps_of(tmp_path / "parts") == [1, 2, 3, 4, 5]
    assert server.live == {5}


REWARDED = """
import grpo
from worth import WORTH

class Rewarded(grpo.Environment):
    rubric = grpo.Rubric([lambda completion, example: WORTH])

    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
"""


async def test_another_reward_is_refused_and_with_a_word_holds_from_there_on(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewarded.py").write_text(REWARDED)
    (tmp_path / "worth.py").write_text("WORTH = 1.0")
    changes: dict[str, Any] = {"env": [{"id": "rewarded.py:Rewarded"}]}
    await go(tmp_path / "run", server, max_steps=2, **changes)
    (tmp_path / "worth.py").write_text("WORTH = 3.0")
    with pytest.raises((SettingsError, ExceptionGroup)) as caught:
        await go(tmp_path / "run", server, after=2, max_steps=3, **changes)
    assert "worth.py" in "".join(traceback.format_exception(caught.value))
    await go(tmp_path / "run", server, after=2, max_steps=3, **changes, resume_with_changed_code=True)
    assert [line["reward/mean"] for line in lines_of(tmp_path / "run") if "reward/mean" in line] == [1.0, 1.0, 3.0]
    assert code_changes(read_run(tmp_path / "run")) == {2: ["worth.py"]}


async def test_one_that_was_killed_after_the_last_version_ends_it_alone(tmp_path: Path, server: FakeServer) -> None:
    whole = await go(tmp_path, server, max_steps=2)
    (tmp_path / "summary.json").unlink()
    summary = await orchestrate(settings_for(tmp_path, server, max_steps=2))
    assert (summary.steps, summary.versions_served) == (2, whole.versions_served)
    assert summary.rollouts_trained == whole.rollouts_trained
    assert (tmp_path / "summary.json").exists()


async def test_totals_and_examples_begin_anew_without_progress_and_buffer(tmp_path: Path, server: FakeServer) -> None:
    await go(tmp_path, server, max_steps=2)
    skipped = {"skip_buffer": True, "skip_progress": True}
    summary = await go(tmp_path, server, after=2, max_steps=4, ckpt=skipped)
    assert (summary.steps, summary.rollouts_issued, summary.rollouts_trained) == (4, 2 * SIZE, 2 * SIZE)
    assert summary.seconds["train"] == 0.5
    asked = examples(tmp_path)
    assert len(asked) == 4 * GROUPS
    assert asked[2 * GROUPS :] == asked[: 2 * GROUPS]


def run_of(folder: Path) -> RunFolder:
    return RunFolder(path=folder, run_id=str(current_run_id(folder)))


async def test_a_missing_batch_is_made_anew_and_so_are_those_after_it(tmp_path: Path, server: FakeServer) -> None:
    await go(tmp_path, server, max_steps=4)
    shutil.rmtree(step_folder(tmp_path / "batches", 3))
    Checkpoints(run_of(tmp_path)).settle(role="train")  # as a trainer does that joins first
    summary = await go(tmp_path, server, after=2, max_steps=4)
    [aside] = (tmp_path / "superseded").iterdir()
    assert {path.name for path in (aside / "broadcasts").iterdir()} == {"step_000003", "step_000004"}
    assert summary.rollouts_dropped == {"superseded": 2 * SIZE}
    assert summary.rollouts_trained == 4 * SIZE
    asked = examples(tmp_path)
    assert asked[4 * GROUPS :] == asked[2 * GROUPS : 4 * GROUPS]
    assert steps_of(tmp_path) == [1, 2, 3, 4]


async def test_versions_that_were_published_meanwhile_are_written_down_late(tmp_path: Path, server: FakeServer) -> None:
    await go(tmp_path, server, max_steps=3)
    kept = [line for line in lines_of(tmp_path) if line["progress/step"] < 2]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"reward/me')
    summary = await go(tmp_path, server, after=3, max_steps=4)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert all("loss/policy" in line for line in lines_of(tmp_path) if "reward/mean" in line)
    assert (summary.rollouts_trained, summary.rollouts_dropped) == (4 * SIZE, {})


async def test_an_orchestrator_goes_on_only_where_it_may(tmp_path: Path, server: FakeServer) -> None:
    async def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            await go(tmp_path, server, after=3, **{"max_steps": 4} | changes)

    await go(tmp_path, server, max_steps=3)
    await refused(RunFolderError, "resume", resume="never")
    await refused(SettingsError, "batch_size", batch_size=32)
    await refused(RunFolderError, "max_steps", max_steps=2)
    with only_one(tmp_path, "orch"):
        await refused(RunFolderError, "orchestrator")
    missing = step_folder(tmp_path / "batches", 2).rename(tmp_path / "aside")
    await refused(RunFolderError, "step 3")  # which the trainer has trained
    missing.rename(step_folder(tmp_path / "batches", 2))
    shutil.rmtree(tmp_path / "broadcasts")  # with the version to begin with
    await refused(DeadlineError, r"ckpt\.wait_for_weights_timeout", ckpt={"wait_for_weights_timeout": 0.3})
    path = tmp_path / "ledger.sqlite"
    for lose in ("DELETE FROM steps", "DELETE FROM rollouts"):  # the latter leaves an empty one, as a lost file does
        with sqlite3.connect(path) as database:
            database.execute(lose)
        with closing(Ledger(path)) as ledger, pytest.raises(RunFolderError, match=r"ledger\.sqlite"):
            resume(settings_for(tmp_path, server), run_of(tmp_path), ledger)


async def test_what_teachers_cost_stays_spent_where_a_run_goes_back(tmp_path: Path, server: FakeServer) -> None:
    await go(tmp_path, server, max_steps=2)
    spent = {"spent": 7.0}
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.issued(1000, num=1, env="e", example=0, version=0)
    ledger.scored("1000/0", reward=1.0, num_tokens=1)
    ledger.shipping(["1000/0"], 3, state=spent, metrics={})()
    progress = resume(settings_for(tmp_path, server), run_of(tmp_path), ledger)
    ledger.close()
    assert (progress.step, progress.newest_state) == (2, spent)
