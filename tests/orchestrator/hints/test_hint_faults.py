"""Whole runs in which hints come to nothing: the reason is counted and said, and batches are as they would be without
hints."""

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from orchestrator.run import orchestrate
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from transport.records import MicroBatch

NUM_STEPS, BATCH_SIZE = 2, 8
CARELESS = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def zero(completion):
    return 0.0

class Careless(MultiTurnEpisode, Environment):
    """Marks every first answer."""
    rubric = Rubric([zero])
    def __init__(self):
        super().__init__(max_turns=2)
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        if state.turn == 1:
            state.mark_error("careless", "careless", "mind it")
        return "go on"
'''


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(lambda prompt, version: "abc").start()
    yield server
    await server.stop()


async def run(folder: Path, server: FakeServer, hints: dict[str, Any]) -> tuple[list[MicroBatch], list[dict[str, Any]]]:
    """Its batches, and its steps' metrics."""
    (folder / "careless.py").write_text(CARELESS)
    trainer = FakeTrainer(folder / "run", settings={"loss": {"alpha_sdpo": 0.1}})
    trainer.start()
    await orchestrate(
        settings_for(
            folder / "run",
            server,
            env=[{"id": f"{folder / 'careless.py'}:Careless", "name": "careless"}],
            eval={"num_examples": 0},
            hints=hints,
            batch_size=BATCH_SIZE,
            max_steps=NUM_STEPS,
        )
    )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [one for step in trainer.batches.values() for one in step], [line for line in lines if "loss/policy" in line]


async def test_a_hint_that_is_longer_than_the_sequence_allows_is_counted_and_said_and_the_run_goes_on(
    tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / "hints.yaml").write_text(f"careless: {'m' * 200}\n")
    hints = {"sources": ["templates"], "templates": str(tmp_path / "hints.yaml")}
    batches, steps = await run(tmp_path, server, hints)
    assert [line["hints/errors"] for line in steps] == [BATCH_SIZE] * NUM_STEPS
    assert [line["hints/left_out_too_long"] for line in steps] == [BATCH_SIZE] * NUM_STEPS
    assert [line["hints/given"] for line in steps] == [0] * NUM_STEPS
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == NUM_STEPS * BATCH_SIZE * 2 * len("abc.")
    assert not any(batch.hints or batch.num_hint_tokens for batch in batches)


async def test_a_model_that_cannot_be_reached_costs_its_hints_and_the_next_source_is_asked(
    tmp_path: Path, server: FakeServer
) -> None:
    with socket.socket() as taken:  # listens to nobody
        taken.bind(("127.0.0.1", 0))
        api = {"name": "writer", "base_url": f"http://127.0.0.1:{taken.getsockname()[1]}", "model": "x"}
        hints = {"sources": ["model", "environment"], "model": api | {"retries": 0, "timeout_s": 2}}
        batches, steps = await run(tmp_path, server, hints)
    assert [line["hints/declined_model_failed"] for line in steps] == [BATCH_SIZE] * NUM_STEPS
    assert [line["hints/given_environment"] for line in steps] == [BATCH_SIZE] * NUM_STEPS
    assert sum(len(batch.hints) for batch in batches) == NUM_STEPS * BATCH_SIZE
