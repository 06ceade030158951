"""Whole runs that learn from more than rewards: what is asked, what goes with a batch, what a weight of 0 costs."""

import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from orchestrator.preferences.pairs import PairRecord, pair_record
from orchestrator.renderer import ChatRenderer
from orchestrator.run import orchestrate
from tests.orchestrator.chat_server import FakeChatServer, chat_serving
from tests.orchestrator.fakes import MODEL, FakeServer, FakeTrainer, settings_for
from transport.records import Hint, MicroBatch

KEY_VAR = "KEY_OF_A_TEST"
HINTED = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def zero(completion):
    return 0.0

class Wrong(MultiTurnEpisode, Environment):
    """Marks every first answer."""
    rubric = Rubric([zero])
    def __init__(self):
        super().__init__(max_turns=2)
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        odd = int(state.example["prompt"][-1]) % 2
        if state.turn == 1:
            state.mark_error("unknown_word" if odd else "nobody_knows", "words", "there is no such word")
        return "go on"
'''


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = await FakeServer(lambda prompt, version: "abc").start()
    yield server
    await server.stop()


async def run(
    folder: Path,
    server: FakeServer,
    loss: dict[str, Any],
    *,
    step_s: float = 0.0,
    goes_on_after: int | None = None,
    **changes: Any,
) -> tuple[dict[int, tuple[MicroBatch, ...]], list[dict[str, float]]]:
    """The batches by step, and the steps' metrics."""
    trainer = FakeTrainer(folder, settings={"loss": loss}, step_s=step_s, goes_on_after=goes_on_after)
    trainer.start()
    await orchestrate(settings_for(folder, server, eval={"num_examples": 0}, **changes))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return trainer.batches, [line for line in lines if "loss/policy" in line]


def records_of(folder: Path) -> list[PairRecord]:
    """All pairs that a run has kept."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as database:
        return [pair_record(data) for (data,) in database.execute("SELECT record FROM pairs ORDER BY id")]


def named(teachers: FakeChatServer) -> list[dict[str, Any]]:
    return [{"name": name, "base_url": teachers.base_url, "model": name} for name in "ab"]


async def test_the_base_model_as_teacher_scores_every_sampled_token_at_the_temperature_of_its_sampling(
    tmp_path: Path, server: FakeServer
) -> None:
    batches, steps = await run(
        tmp_path,
        server,
        {"teacher_tau": 0.5},
        teacher_model={"policy_every": 0},
        sampling={"max_tokens": 16, "temperature": 1.5},
    )
    assert {body["version"] for body in server.scores} == {None}
    assert {body["temperature"] for body in server.scores} == {1.5}
    for batch in (one for step in batches.values() for one in step):
        assert batch.teacher_logprobs is not None
        expected = np.where(batch.loss_mask, np.float32(-0.5), np.float32(0))
        assert batch.teacher_logprobs.tolist() == expected.tolist()
    assert [line["teacher/rows"] for line in steps] == [16, 16, 16]
    assert [line["teacher/failed"] for line in steps] == [0, 0, 0]


async def test_an_earlier_version_teaches_until_the_next_one_does_and_stays_so_long(
    tmp_path: Path, server: FakeServer
) -> None:
    await run(tmp_path, server, {"teacher_tau": 0.5}, teacher_model={"policy_every": 3}, max_steps=7)
    taught_by = [body["version"] for body in server.scores]
    assert list(dict.fromkeys(taught_by)) == [None, 3, 6]
    assert server.unloads.index(4) < server.unloads.index(3)


async def test_pairs_of_teachers_that_agree_go_with_later_batches_and_are_kept(
    tmp_path: Path, server: FakeServer
) -> None:
    async with chat_serving() as teachers:
        teachers.does |= {"a": lambda messages: "right", "b": lambda messages: "Right!"}
        batches, steps = await run(
            tmp_path,
            server,
            {"beta_replay": 0.1},
            preferences={"teachers": named(teachers), "select": ["all"], "max_pairs": 8},
            max_steps=5,
        )
    records = records_of(tmp_path)
    assert {(record.chosen, record.rejected) for record in records} == {("right", "abc")}
    pairs = [pair for step in batches.values() for batch in step for pair in batch.pairs]
    assert 0 < len(pairs) <= 8 * 5
    assert {bytes(pair.chosen_ids[:-1].astype(np.uint8)) for pair in pairs} == {b"right"}
    assert {pair.chosen_ref_logprob for pair in pairs} == {-0.75 * 6}
    assert {body["version"] for body in server.scores} == {None}
    assert sum(line["pairs/made"] for line in steps) >= len(pairs)


async def test_pairs_that_no_batch_had_taken_go_with_those_of_a_run_that_goes_on(
    tmp_path: Path, server: FakeServer
) -> None:
    async with chat_serving() as teachers:
        asking = {"teachers": named(teachers), "select": ["all"], "max_pairs": 1}
        settings: dict[str, Any] = {"loss": {"beta_replay": 0.1}, "preferences": asking, "step_s": 0.2}
        first, _ = await run(tmp_path, server, max_steps=4, **settings)
        made = len(records_of(tmp_path))
        taken = sum(len(batch.pairs) for step in first.values() for batch in step)
        assert made - taken >= 2
        teachers.does["b"] = lambda messages: "something else"
        settings |= {"goes_on_after": 4, "ckpt": {"resume_step": -1}}
        later, steps = await run(tmp_path, server, max_steps=6, **settings)
    assert [sum(len(batch.pairs) for batch in later[step]) for step in (5, 6)] == [1, 1]
    assert [line["pairs/ready"] for line in steps[-2:]] == [made - taken - 1, made - taken - 2]
    assert len(records_of(tmp_path)) == made


async def test_pairs_of_another_run_are_trained_and_nobody_is_asked(tmp_path: Path, server: FakeServer) -> None:
    loss = {"beta_replay": 0.1}
    async with chat_serving() as teachers:
        asking = {"teachers": named(teachers), "select": ["all"]}
        await run(tmp_path / "first", server, loss, preferences=asking, max_steps=4)
    num_scored = len(server.scores)
    kept = {"pairs": str(tmp_path / "first"), "max_pairs": 3}
    batches, _ = await run(tmp_path / "second", server, loss, preferences=kept)
    assert [sum(len(batch.pairs) for batch in step) for step in batches.values()] == [3, 3, 3]
    assert len(server.scores) == num_scored
    assert records_of(tmp_path / "second") == []


async def test_hints_for_marked_errors_go_with_the_batch_and_what_no_template_is_for_is_counted(
    tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / "envs.py").write_text(HINTED)
    folder = tmp_path / "run"
    batches, steps = await run(
        folder,
        server,
        {"alpha_sdpo": 0.1},
        env=[{"id": f"{tmp_path / 'envs.py'}:Wrong", "name": "wrong"}],
        hints={"sources": ["templates"]},
        batch_size=8,
        conversations={"interval": 1},
    )
    hints = [hint for step in batches.values() for batch in step for _, hint in batch.hints]
    assert sum(line["hints/given"] for line in steps) == len(hints) > 0
    assert sum(line["hints/errors"] for line in steps) == 8 * 3
    assert all(line["hints/given"] + line["hints/left_out_no_source"] == 8 for line in steps)
    assert all(line["hints/declined_off_template"] == line["hints/left_out_no_source"] for line in steps)
    told = [json.loads(line) for line in (folder / "conversations" / "step_000001.jsonl").read_text().splitlines()]
    marked = [step["hint"]["text"] for rollout in told for step in rollout["steps"] if "hint" in step]
    assert all("there is no such word" in text for text in marked)


async def test_hints_that_go_with_no_batch_because_their_rollout_is_withheld_are_not_counted_as_given(
    tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / "envs.py").write_text(HINTED)
    answers = cycle(["ab", "abcdefgh", "ab"])
    server.answer, server.logprob = lambda prompt, version: next(answers), -0.001
    batches, steps = await run(
        tmp_path / "run",
        server,
        {"alpha_sdpo": 0.1},
        env=[{"id": f"{tmp_path / 'envs.py'}:Wrong", "name": "wrong"}],
        hints={"sources": ["environment"]},
        filters=[{"type": "repetition", "enforce": True, "window": 8}],
    )
    totals = Counter[str]()
    for line in steps:
        totals.update({key: int(value) for key, value in line.items() if key.startswith("hints/")})
    assert totals["hints/given"] == sum(len(batch.hints) for step in batches.values() for batch in step) > 0
    assert totals["hints/given_environment"] == totals["hints/given"]
    assert totals["hints/left_out_withheld"] == totals["hints/errors"] - totals["hints/given"] > 0


async def test_a_weight_of_0_asks_nobody_and_adds_nothing(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "envs.py").write_text(HINTED)
    async with chat_serving() as teachers:
        batches, steps = await run(
            tmp_path / "run",
            server,
            {},
            env=[{"id": f"{tmp_path / 'envs.py'}:Wrong", "name": "wrong"}],
            teacher_model={"policy_every": 0},
            hints={"sources": ["environment"]},
            preferences={"teachers": named(teachers), "select": ["all"]},
        )
        assert teachers.requests == []
    assert server.scores == []
    for batch in (one for step in batches.values() for one in step):
        assert (batch.teacher_logprobs, batch.hints, batch.pairs) == (None, (), ())
    assert not [key for line in steps for key in line if key.startswith(("teacher/", "hints/", "pairs/"))]


async def test_a_teacher_that_only_the_launcher_starts_is_asked_for_an_address(
    tmp_path: Path, server: FakeServer
) -> None:
    FakeTrainer(tmp_path, settings={"loss": {"teacher_tau": 1.0}}).start()
    with pytest.raises(ValueError, match="base_url"):
        await orchestrate(settings_for(tmp_path, server, teacher_model={"model": {"name": "larger"}}))


async def test_hints_without_an_environment_that_marks_errors_are_refused(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path, settings={"loss": {"alpha_sdpo": 1.0}}).start()
    with pytest.raises(ValueError, match="errors"):
        await orchestrate(settings_for(tmp_path, server))


async def test_solutions_without_an_environment_that_has_any_are_refused(tmp_path: Path, server: FakeServer) -> None:
    FakeTrainer(tmp_path, settings={"loss": {"alpha_sdpo": 1.0}}).start()
    with pytest.raises(ValueError, match="solution"):
        await orchestrate(settings_for(tmp_path, server, hints={"sources": ["solution"]}))


async def test_a_sample_leaves_room_for_the_token_that_scoring_samples(tmp_path: Path, server: FakeServer) -> None:
    server.info["max_model_len"] = 64
    server.answer = lambda prompt, version: "a" * 100
    batches, steps = await run(
        tmp_path, server, {"teacher_tau": 0.5}, teacher_model={"policy_every": 0}, max_steps=1, sampling={}
    )
    assert max(int(batch.sequence_lengths.max()) for batch in batches[1]) == 63
    assert steps[0]["teacher/failed"] == 0


async def test_a_run_asks_the_teacher_at_its_address_with_the_key_that_is_named(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VAR, "secret")
    teacher = await FakeServer().start()
    teacher.api_key, teacher.scored = "secret", -0.25
    client = {"base_url": [teacher.url], "api_key_var": KEY_VAR}
    asking = {"model": {"name": str(MODEL)}, "client": client}
    batches, _ = await run(tmp_path, server, {"teacher_tau": 1.0}, teacher_model=asking, max_steps=1)
    await teacher.stop()
    for batch in batches[1]:
        assert batch.teacher_logprobs is not None
        assert set(batch.teacher_logprobs[batch.loss_mask].tolist()) == {-0.25}
    assert server.scores == []


# --- hints ---

MARKING = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def zero(completion):
    return 0.0

class Wrong(MultiTurnEpisode, Environment):
    """Marks the first two of three answers."""
    rubric = Rubric([zero])
    max_turns = 3
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        if state.turn < 3:
            state.mark_error("unknown_word", "words", "there is no such word")
        return "go on"
'''


async def hinted(folder: Path, server: FakeServer, **hints: Any) -> tuple[list[Hint], dict[str, float], str]:
    """The hints of a batch of 8 rollouts, its metrics, and the first of what the teacher of hints read."""
    (folder / "envs.py").write_text(MARKING)
    batches, [line] = await run(
        folder / "run",
        server,
        {"alpha_sdpo": 0.1},
        env=[{"id": f"{folder / 'envs.py'}:Wrong"}],
        hints=hints,
        batch_size=8,
        max_steps=1,
    )
    found = [hint for batch in batches[1] for _, hint in batch.hints]
    return found, line, ChatRenderer.of_model(MODEL).raw_text(found[0].teacher_token_ids.tolist())


async def test_hints_come_from_the_sources_with_the_texts_the_length_and_the_role_that_are_set(
    tmp_path: Path, server: FakeServer
) -> None:
    (tmp_path / "own.yaml").write_text('words: "Mind this. {message}"\n')
    templates = {"sources": ["sibling", "templates"], "templates": str(tmp_path / "own.yaml")}
    found, line, text = await hinted(tmp_path, server, **templates, role="system", max_per_sample=1, max_chars=9)
    assert (len(found), line["hints/given_templates"], line["hints/left_out_beyond_first"]) == (8, 8, 8)
    assert line["hints/declined_no_sibling"] == 8
    assert "<|im_start|>system\nMind this. there is ...<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>" in text
    assert {len(hint.student_index) for hint in found} == {len("abc") + 1}


HALF = '''
from grpo import Environment, MultiTurnEpisode, Rubric

def half(completion):
    return 0.5

class Half(MultiTurnEpisode, Environment):
    """Marks one of two answers, and gives half a point for either."""
    rubric = Rubric([half])
    max_turns = 2
    def dataset(self, split):
        return [{"prompt": f"{split} {number}"} for number in range(8)]
    async def respond(self, state, ctx):
        if state.last_text == "bad":
            state.mark_error("unknown_word", "words", "there is no such word")
        return "go on"
'''


@pytest.mark.parametrize(("reward", "given"), [({}, False), ({"sibling_reward": 0.5}, True)])
async def test_a_sibling_succeeded_from_the_reward_that_is_set(
    tmp_path: Path, server: FakeServer, reward: dict[str, float], given: bool
) -> None:
    answers = cycle(["bad", "good"])
    server.answer = lambda prompt, version: next(answers)
    (tmp_path / "envs.py").write_text(HALF)
    env = [{"id": f"{tmp_path / 'envs.py'}:Half"}]
    hints = {"sources": ["sibling"], "max_per_sample": 1} | reward
    _, [line] = await run(
        tmp_path / "run", server, {"alpha_sdpo": 0.1}, env=env, hints=hints, batch_size=8, max_steps=1
    )
    assert line["hints/errors"] > 0
    assert (line["hints/given"] > 0, line.get("hints/declined_no_sibling", 0) > 0) == (given, not given)


async def test_a_model_writes_hints_and_what_follows_is_compared_if_wanted(tmp_path: Path, server: FakeServer) -> None:
    async with chat_serving() as fake:
        fake.does["writer"] = lambda messages: "Mind the gap."
        writer = {"name": "w", "base_url": fake.base_url, "model": "writer", "price": {"prompt": 10.0}}  # 1 a question
        found, line, text = await hinted(
            tmp_path, server, sources=["model"], model=writer, max_per_sample=1, until_end=True
        )
        assert line["hints/given_model"] == 8
        assert line["hints/model_cost"] == line["hints/model_answered"] == fake.num_requests("writer")
        assert "<|im_start|>user\nMind the gap.<|im_end|>\n" in text
        assert {len(hint.student_index) for hint in found} == {3 * (len("abc") + 1)}
        assert "there is no such word" in json.dumps(fake.requests[0][1]["messages"])


SOLVED = '''
from grpo import Environment, Rubric

def zero(completion):
    return 0.0

class Solved(Environment):
    """Single questions, whose examples have a solution, of which the policy sees nothing."""
    rubric = Rubric([zero])
    def dataset(self, split):
        return [{"prompt": f"{split} {number}", "solution": f"It is {number}."} for number in range(8)]
'''


async def test_the_own_solution_of_an_example_is_a_hint_for_every_answer(tmp_path: Path, server: FakeServer) -> None:
    (tmp_path / "envs.py").write_text(SOLVED)
    batches, [line] = await run(
        tmp_path / "run",
        server,
        {"alpha_sdpo": 0.1},
        env=[{"id": f"{tmp_path / 'envs.py'}:Solved"}],
        hints={"sources": ["solution"]},
        batch_size=8,
        max_steps=1,
    )
    hints = [hint for batch in batches[1] for _, hint in batch.hints]
    assert len(hints) == line["hints/given_solution"] == line["hints/given"] == line["hints/errors"] == 8
    for hint in hints:
        text = ChatRenderer.of_model(MODEL).raw_text(hint.teacher_token_ids.tolist())
        question, _, hinted = text.partition("The solution is:\nIt is ")
        assert f"train {hinted[0]}" in question
        assert {len(hint.student_index)} == {len("abc") + 1}
