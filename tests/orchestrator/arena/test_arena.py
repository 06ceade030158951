"""Schedules of one's own: what they train, keep and drop in a run, and what they show without one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from grpo.configs.orch import OrchSettings
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.summary import Summary
from grpo.orchestrator.run import orchestrate
from grpo.transport.errors import UserError
from grpo.transport.traces import trace_path

from grpo import (
    Arena,
    Episode,
    EpisodeRequest,
    EpisodeState,
    MockClient,
    Role,
    RolloutContext,
    Rubric,
    SingleTurnEpisode,
    TrainingBatch,
    VerboseLogger,
)
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for

SOURCE = """
from grpo import Arena, EpisodeRequest, Rubric, SingleTurnEpisode

def right(completion, example):
    return float(completion == "aaaa")

class Half(Arena):
    def setup(self):
        self.add_episode("say", SingleTurnEpisode(rubric=Rubric([right])))
        self.add_store("words", ["tea", "rain"], max_size=5)

    def get_batch(self):
        word, = self.stores["words"].sample(1)
        self.stores["words"].set_weight(word.id, 1.0 + self.policy_version)
        return [EpisodeRequest("say", {"prompt": word.data}, meta={"version": self.policy_version}) for _ in range(8)]

    async def main(self):
        while not self.finished:
            results = await self.generate_rollouts(self.get_batch())
            again = await self.generate_rollouts(self.get_batch()[:2])
            await self.train(await self.build_training_batch([*results[:6], *again], meta={"mine": 1}))

class Short(Half):
    async def main(self):
        await self.step()

class Idle(Half):
    def get_batch(self):
        return []
    async def main(self):
        await self.step()

class Broken(Half):
    def setup(self):
        super().setup()
        self.episodes["say"].rubric = Rubric([lambda completion: 1 / 0])
"""


def arena_settings(folder: Path, server: FakeServer, name: str, **changes: object) -> OrchSettings:
    (folder / "arena.py").write_text(SOURCE)
    given = {"arena": f"{folder / 'arena.py'}:{name}", "env": [], "rollouts_per_example": 8, "max_steps": 3}
    return settings_for(folder / "run", server, **given, **changes)


async def run_arena(folder: Path, name: str, **changes: object) -> tuple[FakeTrainer, Summary]:
    number = iter(range(10**6))
    server = await FakeServer(lambda prompt, version: "a" if next(number) % 2 else "aaaa").start()
    trainer = FakeTrainer(folder / "run")
    trainer.start()
    try:
        summary = await orchestrate(arena_settings(folder, server, name, **changes))
    finally:
        await server.stop()
    return trainer, summary


async def test_a_run_trains_what_the_schedule_chooses_and_says_what_became_of_the_rest(tmp_path: Path) -> None:
    trainer, summary = await run_arena(tmp_path, "Half")
    ledger = Ledger(tmp_path / "run/ledger.sqlite")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/num"] for line in lines if "rollout/num" in line] == [8, 8, 8]
    assert (summary.rollouts_trained, summary.rollouts_dropped) == (24, {"not_in_batch": 6})
    assert sorted(weight for _, weight, _ in ledger.artifacts("arena/train/words"))[1] > 1
    ledger.close()
    rows = pq.read_table(trace_path(tmp_path / "run", 2)).to_pylist()
    assert all("version" in json.loads(row["extras"])["meta"] for row in rows)
    ids = [one for batch in trainer.batches[2] for one in batch.rollout_ids]
    assert sorted(ids) == ["1/0", "1/1", "1/2", "1/3", "1/4", "1/5", "1/8", "1/9"]


async def test_a_schedule_that_ends_too_early_or_whose_episodes_all_fail_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        await run_arena(tmp_path, "Short")
    (tmp_path / "other").mkdir()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        await run_arena(tmp_path / "other", "Broken")
    (tmp_path / "idle").mkdir()
    with pytest.raises(UserError, match="get_batch"):
        await run_arena(tmp_path / "idle", "Idle")


@pytest.mark.parametrize(
    "changes", [{"env": []}, {"arena": "a.py:A"}, {"env": [], "arena": "a.py:A", "eval": {"num_examples": 3}}]
)
def test_an_arena_stands_instead_of_environments(changes: dict[str, object]) -> None:
    settings = settings_for(Path("x"), FakeServer(), **changes)
    assert any("arena" in message for _, message in settings.conflicts())


# --- without a run ---


class Propose(Episode):
    roles = (Role(id="proposer"),)
    rubric = Rubric([lambda extras: extras["pass_rate"]])

    async def rollout(self, ctx: RolloutContext, state: EpisodeState) -> None:
        question = (await ctx.sample("proposer", [{"role": "user", "content": state.example["artifact"]}])).text
        await ctx.stores["asked"].add(question)
        await ctx.spawn("solve", [{"prompt": question}] * 2)

    def extras(self, state: EpisodeState) -> dict[str, float]:
        return {"pass_rate": sum(child.reward for child in state.children) / 2}


class Asking(Arena):
    def setup(self) -> None:
        self.add_role(Role(id="solver", system_prompt="Solve."))
        self.add_episode("propose", Propose())
        solved = Rubric([lambda completion: float(completion == "yes")])
        self.add_episode("solve", SingleTurnEpisode(rubric=solved, roles=[Role(id="solver")]))
        self.add_store("asked")

    async def get_batch(self) -> Sequence[EpisodeRequest]:
        return [EpisodeRequest("propose", "Ask.", {"n": n}) for n in range(2)]

    def group_of(self, request: EpisodeRequest) -> object:
        return request.artifact


async def batch_of(arena: Arena) -> TrainingBatch:
    [batch] = [batch async for batch in arena.run(num_steps=1, concurrency=1)]
    return batch


async def test_without_a_run_any_client_answers_and_credit_is_by_group_and_level() -> None:
    client = MockClient(["first?", "yes", "no", "second?", "yes", "yes"])
    arena = Asking(client)
    batch = await batch_of(arena)
    assert [result.rewards for result in batch.results] == [{"proposer": 0.5}, {"proposer": 1.0}]
    assert [child.reward for child in batch.results[0].children] == [1.0, 0.0]
    assert batch.results[1].steps[0].text == "second?"
    assert [result.extras["meta"] for result in batch.results] == [{"n": 0}, {"n": 1}]
    assert (batch.meta["num_rollouts"], batch.meta["num_failed"], batch.meta["reward"]) == (2, 0, 0.75)
    assert batch.records == []
    assert sorted(one.data for one in arena.stores["asked"].all()) == ["first?", "second?"]


async def test_what_a_schedule_has_rolled_out_can_be_read_as_a_log(tmp_path: Path) -> None:
    batch = await batch_of(Asking(MockClient(["first?", "yes", "no", "second?", "yes", "yes"])))
    with VerboseLogger(tmp_path / "asking.log") as log:
        log.log_result(batch.results[0])
        log.log_batch_summary(batch.results)
    text = (tmp_path / "asking.log").read_text()
    assert text.count("user: Ask.") == 1
    assert text.count("user: first?") == 2, "the children are in it"
    assert "{'proposer': 0.5}" in text
    assert "2 rollouts, 0 failed, mean reward 0.750" in text
