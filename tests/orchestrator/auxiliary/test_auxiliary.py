"""Whole runs that learn from more than rewards: what is asked, what goes with a batch, what a weight of 0 costs."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from grpo.orchestrator.auxiliary.preferences.pairs import PairRecord, pair_record
from grpo.orchestrator.renderer import ChatRenderer
from grpo.transport.records import MicroBatch
from grpo.transport.traces import trace_path

from tests.orchestrator import running
from tests.orchestrator.auxiliary.teacher.serving import FakeTeacher, answering, in_turn
from tests.orchestrator.chat_server import FakeChatServer
from tests.orchestrator.fakes import MODEL, FakeServer

ENVS = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def zero(completion):
    return 0.0

class Solved(Environment):
    """Single questions, whose examples have a solution, of which the policy sees nothing."""
    rubric = Rubric([zero])
    def dataset(self, split):
        return [{"prompt": f"{split} {number}", "solution": f"It is {number}."} for number in range(8)]

class Wrong(MultiTurnEpisode, Solved):
    """Marks the first two of three answers, the second with a kind that no template is for."""
    max_turns = 3
    async def respond(self, state, ctx):
        if state.turn < 3:
            state.mark_error(["unknown_word", "nobody_knows"][state.turn - 1], "words", "there is no such word")
        return "go on"
'''


@pytest.fixture
def server(server: FakeServer) -> FakeServer:
    server.answer = lambda prompt, version: "abc"
    return server


@pytest.fixture
def teachers(chats: FakeChatServer) -> FakeChatServer:
    chats.does |= {"a": lambda messages: "right", "b": lambda messages: "Right!"}
    return chats


async def run(
    folder: Path, server: FakeServer, loss: dict[str, Any], *, env: str | None = None, **changes: Any
) -> tuple[dict[int, tuple[MicroBatch, ...]], list[dict[str, float]]]:
    """The batches by step, and the steps' metrics. `env`: one of ENVS."""
    if env is not None:
        (folder.parent / "envs.py").write_text(ENVS)
        changes |= {"env": [{"id": f"{folder.parent / 'envs.py'}:{env}"}], "batch_size": 8}
    trainer = {name: changes.pop(name) for name in ("step_s", "goes_on_after") if name in changes}
    trainer["settings"] = {"loss": loss}
    made = await running.run(folder, server, trainer=trainer, eval={"num_examples": 0}, **changes)
    return made.batches, [line for line in made.lines if "loss/policy" in line]


def flat(batches: dict[int, tuple[MicroBatch, ...]]) -> list[MicroBatch]:
    return [one for step in batches.values() for one in step]


def total(steps: list[dict[str, float]], metric: str) -> float:
    return sum(line.get(metric, 0.0) for line in steps)


# --- a teacher ---


async def test_the_base_model_as_teacher_scores_every_sampled_token_at_the_temperature_of_its_sampling(
    tmp_path: Path, server: FakeServer
) -> None:
    server.info["max_model_len"] = 64
    server.answer = lambda prompt, version: "a" * 100
    sampling = {"max_tokens": None, "temperature": 1.5}
    batches, steps = await run(
        tmp_path, server, {"teacher_tau": 0.5}, teacher_model={"reference": True}, sampling=sampling
    )
    assert {(body["version"], body["temperature"]) for body in server.scores} == {(None, 1.5)}
    for batch in flat(batches):
        assert batch.teacher_logprobs is not None
        assert batch.teacher_logprobs.tolist() == (-0.5 * batch.loss_mask).tolist()
        assert batch.sequence_lengths.max() == 63  # vLLM samples one more than it scores
    assert [line["teacher/rows"] for line in steps] == [16, 16, 16]
    assert total(steps, "teacher/failed") == 0


async def test_what_a_teacher_does_instead_of_answering_costs_these_rollouts_and_is_counted_by_its_reason(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "secret")
    letters = cycle("abcdefg")  # so that most rows are asked about
    server.answer = lambda prompt, version: next(letters)
    teacher = FakeTeacher(ours=True, info={"max_model_len": 512}, api_key="secret")
    teacher.fault = in_turn(None, *[answering(400)] * 5)  # the first request is that of start-up
    client = {"base_url": [teacher.url], "api_key_var": "KEY_OF_A_TEST"}
    asking = {"model": {"name": str(MODEL)}, "client": client}
    async with teacher.serving():
        batches, steps = await run(tmp_path, server, {"adv_tau": 0.0, "teacher_tau": 1.0}, teacher_model=asking)
    failed = total(steps, "teacher/failed_refused")
    assert total(steps, "teacher/failed") == total(steps, "rollout/dropped_teacher_refused") == failed >= 5
    trained = [name for batch in flat(batches) for name in batch.rollout_ids]
    assert len(trained) == len(set(trained)) < 48
    for batch in flat(batches):
        assert batch.teacher_logprobs is not None
        expected = np.where(batch.loss_mask, -batch.token_ids / 100, 0).astype(np.float32)
        np.testing.assert_allclose(batch.teacher_logprobs, expected, rtol=1e-6)
    assert server.scores == []


# --- preferences ---


def records_of(folder: Path) -> list[PairRecord]:
    """All pairs that a run has kept."""
    return [pair_record(data) for (data,) in running.rows_of(folder, "SELECT record FROM pairs ORDER BY id")]


def asking(teachers: FakeChatServer, **settings: Any) -> dict[str, Any]:
    named = [{"name": name, "base_url": teachers.base_url, "model": name} for name in "ab"]
    return {"teachers": named, "select": ["all"]} | settings


def num_pairs(batches: dict[int, tuple[MicroBatch, ...]]) -> list[int]:
    return [sum(len(batch.pairs) for batch in step) for _, step in sorted(batches.items())]


async def test_pairs_go_with_later_batches_and_those_left_with_the_batches_of_a_run_that_goes_on(
    tmp_path: Path, server: FakeServer, teachers: FakeChatServer
) -> None:
    settings: dict[str, Any] = {"preferences": asking(teachers, max_pairs=1), "step_s": 0.2}
    first, steps = await run(tmp_path, server, {"beta_replay": 0.1}, max_steps=4, **settings)
    records = records_of(tmp_path)
    assert {(record.chosen, record.rejected) for record in records} == {("right", "abc")}
    pairs = [pair for batch in flat(first) for pair in batch.pairs]
    assert {(bytes(pair.chosen_ids[:-1].tolist()), pair.chosen_ref_logprob) for pair in pairs} == {(b"right", -4.5)}
    assert {body["version"] for body in server.scores} == {None}
    num_left = len(records) - len(pairs)
    assert num_left >= 2
    assert total(steps, "pairs/made") <= len(records)

    teachers.does["b"] = lambda messages: "something else"
    settings |= {"goes_on_after": 4}
    later, steps = await run(tmp_path, server, {"beta_replay": 0.1}, max_steps=6, **settings)
    assert num_pairs(later)[-2:] == [1, 1]
    assert [line["pairs/ready"] for line in steps[-2:]] == [num_left - 1, num_left - 2]
    assert len(records_of(tmp_path)) == len(records)


async def test_pairs_of_another_run_are_trained_and_nobody_is_asked(
    tmp_path: Path, server: FakeServer, teachers: FakeChatServer
) -> None:
    loss = {"beta_replay": 0.1}
    await run(tmp_path / "first", server, loss, preferences=asking(teachers), max_steps=4)
    num_scored = len(server.scores)
    kept = {"pairs": str(tmp_path / "first"), "max_pairs": 3}
    batches, _ = await run(tmp_path / "second", server, loss, preferences=kept)
    assert num_pairs(batches) == [3, 3, 3]
    assert len(server.scores) == num_scored
    assert records_of(tmp_path / "second") == []


# --- hints ---


def texts_of(batches: dict[int, tuple[MicroBatch, ...]]) -> list[str]:
    """What the teacher of each hint has read."""
    hints = [hint for batch in flat(batches) for _, hint in batch.hints]
    return [ChatRenderer.of_model(MODEL).raw_text(hint.teacher_token_ids.tolist()) for hint in hints]


async def test_hints_come_from_the_sources_in_their_order_and_what_none_is_for_is_counted(
    tmp_path: Path, server: FakeServer, teachers: FakeChatServer
) -> None:
    (tmp_path / "own.yaml").write_text('unknown_word: "Mind this. {message}"\n')
    teachers.does["writer"] = lambda messages: "Mind the gap." if len(teachers.requests) > 1 else ""
    writer = {"name": "w", "base_url": teachers.base_url, "model": "writer", "price": {"prompt": 10.0}}  # 1 a question
    sources = {"sources": ["templates", "model"], "templates": str(tmp_path / "own.yaml"), "model": writer}
    folder = tmp_path / "run"
    batches, [line] = await run(folder, server, {"alpha_sdpo": 0.1}, env="Wrong", hints=sources, max_steps=1)
    texts = texts_of(batches)
    assert len(texts) == 8  # all hints of a row are one
    counts = {"errors": 16, "given": 15, "given_templates": 8, "given_model": 7, "left_out_no_source": 1}
    assert {name: line[f"hints/{name}"] for name in counts} == counts
    assert (line["hints/declined_off_template"], line["hints/declined_model_silent"]) == (8, 1)
    assert line["hints/model_cost"] == line["hints/model_asked"] == teachers.num_requests("writer")
    told = "<|im_start|>user\nMind this. there is no such word<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>"
    assert all(told in text for text in texts)
    assert sum("<|im_start|>user\nMind the gap.<|im_end|>\n" in text for text in texts) == 7
    told = pq.read_table(trace_path(folder, 1)).to_pylist()
    assert "Mind this. there is no such word" in told[0]["hint"]


async def test_the_own_solution_of_an_example_is_a_hint_for_every_answer(tmp_path: Path, server: FakeServer) -> None:
    batches, [line] = await run(
        tmp_path / "run", server, {"alpha_sdpo": 0.1}, env="Solved", hints={"sources": ["solution"]}, max_steps=1
    )
    texts = texts_of(batches)
    assert len(texts) == line["hints/given_solution"] == line["hints/given"] == line["hints/errors"] == 8
    for text in texts:
        question, _, hinted = text.partition("The solution is:\nIt is ")
        assert f"train {hinted[0]}" in question


# --- evidence as an advantage ---


async def test_hints_and_teachers_as_advantages_send_the_trainer_nothing_else(
    tmp_path: Path, server: FakeServer, teachers: FakeChatServer
) -> None:
    batches, steps = await run(
        tmp_path / "run",
        server,
        {},
        env="Wrong",
        hints={"sources": ["environment"], "advantage_weight": 0.1},
        preferences=asking(teachers, advantage_weight=0.3),
    )
    assert {body["version"] for body in server.scores} <= {0, 1, 2}
    assert server.scores
    for batch in flat(batches):
        assert (batch.hints, batch.pairs) == ((), ())
        # the reward is 0, and both teachers prefer another action: -0.3; the server sampled at -0.25 and says -0.5 of
        # what has a hint: 0.1 · -0.25 on top
        found = {round(float(value), 4) for value in batch.advantages[batch.loss_mask]}
        assert found <= {-0.3, -0.325}
        assert -0.3 in found
    assert total(steps, "evidence/hinted") > 0
    assert total(steps, "evidence/asked") >= total(steps, "evidence/hinted")


# --- what is off, and what cannot be honoured ---


async def test_a_weight_of_0_asks_nobody_and_adds_nothing(
    tmp_path: Path, server: FakeServer, teachers: FakeChatServer
) -> None:
    others: dict[str, Any] = {"teacher_model": {"reference": True}, "hints": {"sources": ["environment"]}}
    batches, steps = await run(tmp_path / "run", server, {}, env="Wrong", preferences=asking(teachers), **others)
    assert (server.scores, teachers.requests) == ([], [])
    for batch in flat(batches):
        assert (batch.teacher_logprobs, batch.hints, batch.pairs) == (None, (), ())
    assert not [key for line in steps for key in line if key.startswith(("teacher/", "hints/", "pairs/"))]


@pytest.mark.parametrize(
    ("loss", "changes", "told"),
    [
        ("teacher_tau", {"teacher_model": {"model": {"name": "larger"}}}, "base_url"),
        ("alpha_sdpo", {}, "errors"),
        ("alpha_sdpo", {"hints": {"sources": ["solution"]}}, "solution"),
    ],
)
async def test_what_a_loss_needs_and_has_not_is_named(
    tmp_path: Path, server: FakeServer, loss: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        await run(tmp_path, server, {loss: 1.0}, **changes)
