"""Whole runs of the orchestrator against servers and a trainer that are stand-ins."""

import asyncio
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from grpo.orchestrator.monitoring.summary import Summary
from grpo.orchestrator.run import orchestrate
from grpo.transport.records import MicroBatch
from grpo.transport.traces import trace_path, traced_steps

from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for

REWARDED = """
import os, time
from grpo import Environment, Rubric

def reward(completion, example):
    {body}

class Rewarded(Environment):
    rubric = Rubric([reward])
    def dataset(self, split):
        return [{{"prompt": f"say {{i}}", "answer": "a", "split": split, "index": i}} for i in range(20)]
"""


def rewarded(folder: Path, body: str) -> list[dict[str, str]]:
    """Settings of an environment whose reward is this code."""
    (folder / "rewarded.py").write_text(REWARDED.format(body=body))
    return [{"id": f"{folder}/rewarded.py:Rewarded"}]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows_of(folder: Path, query: str) -> list[Any]:
    """Of the ledger."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        return database.execute(query).fetchall()


def check_drops(folder: Path) -> set[str]:
    """The reasons why rollouts were dropped, of which ledger and traces must tell the same."""
    tables = [pq.read_table(trace_path(folder, step)) for step in traced_steps(folder)]
    traced = {row["rollout"]: row["drop_reason"] for table in tables for row in table.to_pylist() if row["drop_reason"]}
    dropped = dict(rows_of(folder, "SELECT id, reason FROM rollouts WHERE state = 'dropped'"))
    assert traced == dropped
    return set(dropped.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has done."""

    summary: Summary
    trainer: FakeTrainer
    lines: list[dict[str, Any]]
    """Of metrics.jsonl."""

    @property
    def batches(self) -> dict[int, tuple[MicroBatch, ...]]:
        return self.trainer.batches

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines that batches have, in their order."""
        return [line for line in self.lines if "reward/mean" in line]

    @property
    def trained(self) -> list[str]:
        """The rollouts of all batches, in their order."""
        return [one for _, batches in sorted(self.batches.items()) for batch in batches for one in batch.rollout_ids]


async def run(
    folder: Path, *servers: FakeServer, trainer: FakeTrainer | Mapping[str, Any] | None = None, **changes: Any
) -> Run:
    """A small and quick run. `trainer`: it, or what is given to it; `changes` to the orchestrator's settings."""
    made = trainer if isinstance(trainer, FakeTrainer) else FakeTrainer(folder, **(trainer or {}))
    made.start()
    try:
        async with asyncio.timeout(180):
            summary = await orchestrate(settings_for(folder, *servers, **changes))
    finally:
        made.end()  # where the run failed, the next one of this folder needs its lock
    return Run(summary=summary, trainer=made, lines=lines_of(folder))
