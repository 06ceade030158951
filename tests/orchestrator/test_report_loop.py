"""The loop that completes checkpoints and lets artifact stores forget."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.ledger import NUM_STATES, Ledger
from orchestrator.loops.report import Reporting
from orchestrator.loops.shared import Shared
from transport.checkpoints import ORCHESTRATOR, TRAINER, Checkpoints
from transport.folders import step_folder, write_folder
from transport.run import RunFolder, found_run

INTERVAL, KEPT = 10, 8
assert INTERVAL * (KEPT - 1) > NUM_STATES


class Stores:
    """Writes down what it may forget."""

    def __init__(self) -> None:
        self.settled: list[Mapping[str, Any]] = []

    def settle(self, state: Mapping[str, Any]) -> None:
        self.settled.append(state)


class Running:
    """A run whose ledger and checkpoints are real."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.stores, self.ledger = run, Stores(), Ledger(run.path / "ledger.sqlite")
        shared = SimpleNamespace(
            ledger=self.ledger, engine=SimpleNamespace(stores=self.stores), checkpoints=Checkpoints(run)
        )
        self.reporting = Reporting(cast(Shared, shared))

    def ships(self, step: int) -> None:
        self.ledger.shipping([], step, state={"artifacts": {"topics": {"num_operations": step}}}, metrics={})()

    async def train(self, first: int, last: int) -> None:
        """Steps with their checkpoints, of which the trainer keeps the newest."""
        for step in range(first, last + 1):
            self.ships(step)
            if step % INTERVAL == 0:
                part = step_folder(self.run.checkpoints, step) / TRAINER
                about = json.dumps({"step": step, "run_id": self.run.run_id}).encode()
                write_folder(part, {"weights": b"w"}, lambda _, about=about: about)  # type: ignore[misc]
                old = step_folder(self.run.checkpoints, step - KEPT * INTERVAL)
                shutil.rmtree(old / TRAINER, ignore_errors=True)
                await self.reporting.complete_checkpoints()


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(found_run(tmp_path / "run"))


def of(*steps: int) -> list[dict[str, dict[str, int]]]:
    return [{"topics": {"num_operations": step}} for step in steps]


async def test_stores_may_forget_what_came_before_the_oldest_checkpoint_also_where_the_ledger_has_forgotten_it(
    running: Running,
) -> None:
    await running.train(1, 150)
    assert running.ledger.state_after(80) is None
    assert running.stores.settled == of(10, 20, 30, 40, 50, 60, 70, 80)
    running.ledger.close()


async def test_a_checkpoint_whose_state_is_damaged_lets_stores_keep_all_until_it_is_gone(running: Running) -> None:
    await running.train(1, 80)
    (step_folder(running.run.checkpoints, 20) / ORCHESTRATOR / "state.json").write_text("{}")
    await running.train(81, 100)
    assert running.stores.settled == [*of(10), {}, *of(30)]
    running.ledger.close()
