"""The loop that completes checkpoints and lets the ledger forget artifacts."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from orchestrator.ledger import Ledger
from orchestrator.loops.report import Reporting
from orchestrator.loops.shared import Shared
from transport.checkpoints import TRAINER, Checkpoints
from transport.folders import step_folder, write_folder
from transport.run import RunFolder, create_run

INTERVAL, KEPT = 10, 8


class Running:
    """A run whose ledger and checkpoints are real."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.ledger = run, Ledger(run.path / "ledger.sqlite")
        shared = SimpleNamespace(ledger=self.ledger, checkpoints=Checkpoints(run))
        self.reporting = Reporting(cast(Shared, shared))

    def ships(self, step: int) -> None:
        """A store holds the number of the newest step alone."""
        gone = [str(step - 1)] if step > 1 else []
        self.ledger.artifacts_changed("newest", [*gone, str(step)], [(str(step), step, 1.0, str(step))], step)
        self.ledger.shipping([], step, state={"open": []}, metrics={})()

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


async def test_artifacts_that_are_gone_are_forgotten_once_no_checkpoint_is_left_that_had_them(tmp_path: Path) -> None:
    running = Running(create_run(tmp_path / "run"))
    await running.train(1, 150)
    with closing(sqlite3.connect(running.ledger.path)) as database:
        removed = database.execute("SELECT min(removed_step) FROM artifacts").fetchone()[0]
    # Checkpoints 80 to 150 are left: what had gone with batch 80 is asked for by none.
    assert removed == 81
    running.ledger.resume(80)
    assert [data for *_, data in running.ledger.artifacts("newest")] == ["80"]
    running.ledger.close()
