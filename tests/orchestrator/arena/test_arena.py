"""Schedules of one's own: what they train, keep and drop in a run, and what they show without one."""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from grpo.orchestrator.ledger import Ledger
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
from tests.orchestrator.fakes import FakeServer, settings_for
from tests.orchestrator.running import Run, run

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


async def run_arena(folder: Path, server: FakeServer, name: str) -> Run:
    (folder / "arena.py").write_text(SOURCE)
    answers = cycle(["aaaa", "a"])
    server.answer = lambda prompt, version: next(answers)
    return await run(folder / "run", server, arena=f"{folder / 'arena.py'}:{name}", env=[], rollouts_per_example=8)


async def test_a_run_trains_what_the_schedule_chooses_and_says_what_became_of_the_rest(
    tmp_path: Path, server: FakeServer
) -> None:
    made = await run_arena(tmp_path, server, "Half")
    ledger = Ledger(tmp_path / "run/ledger.sqlite")
    assert [line["rollout/num"] for line in made.steps] == [8, 8, 8]
    assert (made.summary.rollouts_trained, made.summary.rollouts_dropped) == (24, {"not_in_batch": 6})
    assert sorted(weight for _, weight, _ in ledger.artifacts("arena/train/words"))[1] > 1
    ledger.close()
    rows = pq.read_table(trace_path(tmp_path / "run", 2)).to_pylist()
    assert all("version" in json.loads(row["extras"])["meta"] for row in rows)
    ids = [one for batch in made.batches[2] for one in batch.rollout_ids]
    assert sorted(ids) == ["1/0", "1/1", "1/2", "1/3", "1/4", "1/5", "1/8", "1/9"]


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [("Short", ValueError, "max_steps"), ("Broken", Exception, "ZeroDivisionError"), ("Idle", UserError, "get_batch")],
)
async def test_a_schedule_that_ends_too_early_or_whose_episodes_all_fail_stops_the_run(
    tmp_path: Path, server: FakeServer, name: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        await run_arena(tmp_path, server, name)


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


async def asked() -> tuple[Asking, TrainingBatch]:
    arena = Asking(MockClient(["first?", "yes", "no", "second?", "yes", "yes"]))
    [batch] = [batch async for batch in arena.run(num_steps=1, concurrency=1)]
    return arena, batch


async def test_without_a_run_any_client_answers_and_credit_is_by_group_and_level() -> None:
    arena, batch = await asked()
    assert [result.rewards for result in batch.results] == [{"proposer": 0.5}, {"proposer": 1.0}]
    assert [child.reward for child in batch.results[0].children] == [1.0, 0.0]
    assert batch.results[1].steps[0].text == "second?"
    assert [result.extras["meta"] for result in batch.results] == [{"n": 0}, {"n": 1}]
    assert (batch.meta["num_rollouts"], batch.meta["num_failed"], batch.meta["reward"]) == (2, 0, 0.75)
    assert batch.records == []
    assert sorted(one.data for one in arena.stores["asked"].all()) == ["first?", "second?"]


async def test_what_a_schedule_has_rolled_out_can_be_read_as_a_log(tmp_path: Path) -> None:
    _, batch = await asked()
    with VerboseLogger(tmp_path / "asking.log") as log:
        log.log_result(batch.results[0])
        log.log_batch_summary(batch.results)
    text = (tmp_path / "asking.log").read_text()
    assert text.count("user: Ask.") == 1
    assert text.count("user: first?") == 2, "the children are in it"
    assert "{'proposer': 0.5}" in text
    assert "2 rollouts, 0 failed, mean reward 0.750" in text
