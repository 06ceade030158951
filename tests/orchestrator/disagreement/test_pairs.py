"""Turns of rollouts, pairs as tokens, and the file that keeps them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from orchestrator.disagreement.actions import Action, Call
from orchestrator.disagreement.pairs import PairTokens, answer_ids, pair_tokens, referenced
from orchestrator.disagreement.records import KeptPairs, PairRecord, PairsFile, pairs_of_run, read_pairs, tokens_of
from orchestrator.disagreement.turns import TraceTurn, turns_of
from orchestrator.disagreement.verdicts import Preference, Skipped
from orchestrator.episodes.conversation import Conversation
from orchestrator.episodes.records import Completion, EpisodeResult, Step, Task
from orchestrator.episodes.state import StepError
from orchestrator.episodes.templates import ChatTemplate
from tests.orchestrator.chat_templates import CHATML, LLAMA3, PLAIN, QWEN3, renderer
from transport.errors import CorruptError
from transport.records import PreferencePair

SOURCES = {"quickstart": None, "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}
TEMPLATES = {name: ChatTemplate.of(renderer(source)) for name, source in SOURCES.items()}
QUICKSTART = TEMPLATES["quickstart"]
END = 258
HI = {"role": "user", "content": "hi"}


def sampled(text: str, *, ended: bool = True) -> Completion:
    ids = [*text.encode(), *([END] if ended else [])]
    return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop" if ended else "length")


def rollout_of(template: ChatTemplate, *answers: str, said: Sequence[Mapping[str, str]] = (HI,)) -> EpisodeResult:
    """A conversation in which what was `said` first is said again after every answer but the last."""
    conversation, steps = Conversation(template, said), list[Step]()
    for n, text in enumerate(answers):
        if n:
            conversation.add(HI)
        completion = sampled(text)
        conversation.prompt_ids()
        told = conversation.answer(completion, version=n, temperature=1.0)
        steps.append(
            Step(
                role="policy",
                temperature=1.0,
                completion=completion,
                text=told,
                version=n,
                messages=tuple(said) if n == 0 else (HI,),
                error=StepError(error_kind="unknown_tool", hint_template_key="tools") if n == 1 else None,
            )
        )
    rows = tuple(structs.replace(row, steps=tuple(turn.index for turn in row.turns)) for row in conversation.rows())
    task = Task(env="e", split="train", index=0, messages=tuple(said))
    return EpisodeResult(id="0/0", task=task, steps=tuple(steps), rows=rows, rewards={"policy": 0.0})


def turn(prompt: Sequence[int], rejected: Sequence[int]) -> TraceTurn:
    return TraceTurn(
        step=0,
        messages=(HI,),
        prompt_ids=prompt,
        sampled_ids=rejected,
        tools=None,
        action=Action(text="Y"),
        versions=((3, len(rejected)),),
        error=None,
    )


def preference(text: str, *calls: Call) -> Preference:
    chosen = Action(text=text, tool_calls=calls)
    return Preference(chosen=chosen, rejected=Action(text="Y"), teachers=("a", "b"), num_answers=3)


# --- turns ---


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_is_what_the_policy_saw_and_what_it_sampled(name: str) -> None:
    template = TEMPLATES[name]
    rollout = rollout_of(template, "one", "two", "three")
    turns = turns_of(rollout)
    assert [one.action.text for one in turns] == ["one", "two", "three"]
    assert [one.step for one in turns] == [0, 1, 2]
    for one, step in zip(turns, rollout.steps, strict=True):
        assert list(one.sampled_ids) == step.completion.token_ids
        assert tuple(one.prompt_ids[-len(template.opening_ids) :]) == template.opening_ids
    answers = [{"role": "assistant", "content": text} for text in ("one", "two")]
    assert turns[2].messages == (HI, answers[0], HI, answers[1], HI)
    assert turns[1].messages == (HI, answers[0], HI)
    assert [one.error is not None for one in turns] == [False, True, False]
    assert turns[2].versions == ((2, 6),)


def test_a_turn_knows_what_could_be_called_in_it() -> None:
    rollout = rollout_of(QUICKSTART, "one", "two")
    tools = ({"type": "function", "function": {"name": "look_up"}},)
    told = structs.replace(rollout, steps=(rollout.steps[0], structs.replace(rollout.steps[1], tools=tools)))
    assert [one.tools for one in turns_of(told)] == [None, tools]


def test_every_conversation_of_a_rollout_begins_anew() -> None:
    first, second = rollout_of(QUICKSTART, "one", "two"), rollout_of(QUICKSTART, "three")
    [row] = second.rows
    rows = (*first.rows, structs.replace(row, steps=(2,)))
    both = structs.replace(first, steps=(*first.steps, *second.steps), rows=rows)
    assert [len(one.messages) for one in turns_of(both)] == [1, 3, 1]


# --- tokens ---


def test_a_pair_is_prompt_teachers_text_and_what_the_student_sampled() -> None:
    prompt = [257, *b"user\nhi", END, *b"\n", *QUICKSTART.opening_ids]
    found = pair_tokens(preference("yes"), turn(prompt, [7, 8]), QUICKSTART, sequence_len=1000)
    assert found == PairTokens(prompt_ids=prompt, chosen_ids=[*b"yes", END], rejected_ids=[7, 8])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ["one", " spaced ", "\nline", "Ünï <b> 1"])
def test_had_the_student_written_what_teachers_did_the_tokens_were_these(name: str, answer: str) -> None:
    template = TEMPLATES[name]
    [one] = turns_of(rollout_of(template, "x"))
    ids = answer_ids(answer, one, template)
    assert ids[-1] == template.end_id
    assert template.renderer.raw_text(ids[:-1]) == answer
    text = template.render([HI]) + answer
    assert [*one.prompt_ids, *ids[:-1]] == template.renderer.ids_of(text)


class Beginnings:
    """A tokenizer that marks the beginning of a text, and makes one token of two line ends."""

    def ids_of(self, text: str) -> list[int]:
        return [1, *(99 if letter == "¶" else ord(letter) for letter in text.replace("\n\n", "¶"))]

    def without_control(self, message: dict[str, str]) -> dict[str, str]:
        return message


def test_an_answer_is_no_beginning_of_a_text_unless_it_would_melt_into_the_opening() -> None:
    opening = "A:\n"
    template = ChatTemplate(
        renderer=Beginnings(),  # type: ignore[arg-type]
        tools=None,
        opening=opening,
        opening_ids=tuple(Beginnings().ids_of(opening)),
        end_id=2,
        local=True,
    )
    opened = turn([5, *template.opening_ids], [7])
    assert answer_ids("yes", opened, template) == [*b"yes", 2]
    assert answer_ids("\nyes", opened, template) == [1, *b"\nyes", 2]
    assert answer_ids("yes", turn([5], [7]), template) == [1, *b"yes", 2]


def test_a_teacher_cannot_spell_out_control_tokens() -> None:
    ids = answer_ids("a<|im_end|>b", turn([1], [2]), QUICKSTART)
    assert ids == [*b"a< |im_end|>b", END]


def test_where_plain_text_ends_an_answer_the_token_that_ended_the_students_does() -> None:
    plain = ChatTemplate.of(renderer(PLAIN))
    assert plain.end_id is None
    assert answer_ids("yes", turn([1], [2, END]), plain) == [*b"yes", END]
    assert answer_ids("yes", turn([1], [2]), plain) == [*b"yes"]


def test_calls_of_an_api_are_written_as_the_policy_writes_them() -> None:
    wanted = preference("", Call(name="add", arguments={"a": 1}))
    found = pair_tokens(wanted, turn([1], [2]), QUICKSTART, sequence_len=1000)
    assert isinstance(found, PairTokens)
    assert (
        QUICKSTART.renderer.raw_text(found.chosen_ids[:-1])
        == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    )
    bare = pair_tokens(wanted, turn([1], [2]), QUICKSTART, sequence_len=1000, write=lambda action: "ADD[1]")
    assert isinstance(bare, PairTokens)
    assert bytes(bare.chosen_ids[:-1]) == b"ADD[1]"


def test_pairs_that_cannot_be_trained_are_skipped_for_a_reason() -> None:
    def reason(text: str, prompt: list[int], rejected: list[int], sequence_len: int) -> str | None:
        found = pair_tokens(preference(text), turn(prompt, rejected), QUICKSTART, sequence_len=sequence_len)
        return found.reason if isinstance(found, Skipped) else None

    assert reason("yes", [1, 2], [7, 8, 9], 9) is None  # 2 + 4 + 3
    assert reason("yes", [1, 2], [7, 8, 9], 8) == "too_long"
    assert reason("yes", [1, 2], [*b"yes", END], 100) == "same_tokens"
    assert reason("", [1, 2], [7], 100) == "empty"
    assert reason("yes", [1, 2], [], 100) == "empty"


# --- the reference ---


class Reference:
    """Every token has a tenth of its id's negative as its log-probability."""

    def __init__(self, *, error: Exception | None = None, shorter: int = 0, value: float | None = None) -> None:
        self.error, self.shorter, self.value = error, shorter, value

    async def logprobs(self, token_ids: Sequence[int]) -> Sequence[float]:
        if self.error is not None:
            raise self.error
        values = [-number / 10 if self.value is None else self.value for number in token_ids]
        return values[: len(values) - self.shorter]


TOKENS = PairTokens(prompt_ids=[50, 60], chosen_ids=[1, 2], rejected_ids=[3, 4, 5])


async def test_the_references_log_probability_is_the_sum_over_the_continuation() -> None:
    pair = await referenced(TOKENS, Reference(), source="2 of 3 teachers: a, b")
    assert isinstance(pair, PreferencePair)
    assert pair.prompt_ids.tolist() == [50, 60]
    assert (pair.chosen_ids.tolist(), pair.rejected_ids.tolist()) == ([1, 2], [3, 4, 5])
    assert pair.chosen_ref_logprob == pytest.approx(-0.3)  # 0.1 + 0.2
    assert pair.rejected_ref_logprob == pytest.approx(-1.2)  # 0.3 + 0.4 + 0.5
    assert pair.source == "2 of 3 teachers: a, b"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (Reference(error=ConnectionError("gone")), "ConnectionError: gone"),
        (Reference(shorter=1), "gave 3 log-probabilities for 4 tokens"),
        (Reference(value=float("nan")), "whose sum is nan"),
        (Reference(value=float("-inf")), "whose sum is -inf"),
    ],
)
async def test_a_reference_that_fails_costs_the_pair_and_nothing_else(reference: Reference, message: str) -> None:
    found = await referenced(TOKENS, reference, source="s")
    assert isinstance(found, Skipped)
    assert found.reason == "reference_failed"
    assert message in found.message


# --- the file ---


def record(n: int = 0) -> PairRecord:
    pair = PreferencePair(
        prompt_ids=np.array([n, 2], np.int32),
        chosen_ids=np.array([3], np.int32),
        rejected_ids=np.array([4, 5], np.int32),
        chosen_ref_logprob=-0.1,
        rejected_ref_logprob=-1 / 3,
        source="2 of 3 teachers: a, b",
    )
    return PairRecord(
        messages=[{"role": "user", "content": "hé\nyou"}],
        chosen="X",
        rejected="Y",
        source=pair.source,
        cost=0.01,
        versions=[[3, 2]],
        rollout_id=f"{n}/0",
        step=1,
        env="e",
        tools=None,
        base_model="identity-1",
        tokens=tokens_of(pair),
    )


def test_what_was_appended_is_read_back_as_pairs(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    file = PairsFile(path)
    for n in range(3):
        file.append(record(n))
    assert read_pairs(path) == [record(n) for n in range(3)]
    pair = read_pairs(path)[2].pair
    assert pair.prompt_ids.tolist() == [2, 2]
    assert pair.prompt_ids.dtype == np.int32
    assert pair.rejected_ref_logprob == -1 / 3
    assert path.read_bytes().count(b"\n") == 3
    assert json.loads(path.read_text().splitlines()[0])["messages"] == [{"role": "user", "content": "hé\nyou"}]


@pytest.mark.parametrize("cut", [1, 40, 70_000])
def test_a_torn_last_line_is_left_out_and_taken_away_before_the_next(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "pairs.jsonl"
    PairsFile(path).append(record(0))
    long = replace(record(1), chosen="X" * 100_000)
    PairsFile(path).append(long)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_pairs(path) == [record(0)]
    PairsFile(path).append(record(2))
    assert read_pairs(path) == [record(0), record(2)]


def test_a_file_that_is_all_torn_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'{"messages": [')
    assert read_pairs(path) == []
    PairsFile(path).append(record(0))
    assert read_pairs(path) == [record(0)]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"messages": 1', json.dumps({"tokens": {}})])
def test_another_line_that_is_no_pair_is_an_error_with_its_place(tmp_path: Path, line: str) -> None:
    path = tmp_path / "pairs.jsonl"
    PairsFile(path).append(record(0))
    with path.open("a") as file:
        file.write(f"{line}\n")
    PairsFile(path).append(record(1))
    with pytest.raises(CorruptError, match=r"pairs.jsonl, line 2 is no preference pair: .*; remove the line"):
        read_pairs(path)


@pytest.mark.parametrize(("name", "value"), [("chosen_ids", []), ("chosen_ids", ["a"]), ("chosen_ids", [-1])])
def test_tokens_that_are_none_are_an_error(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "pairs.jsonl"
    good = record(0)
    PairsFile(path).append(replace(good, tokens={**good.tokens, name: value}))
    with pytest.raises(CorruptError, match="line 1 is no preference pair"):
        read_pairs(path)


# --- an offline run ---


def test_pairs_of_another_base_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for one in (record(0), replace(record(1), base_model="identity-2")):
        PairsFile(path).append(one)
    with pytest.raises(
        ValueError, match=r"line 2 is a pair of a base model with identity identity-2, and .* identity-1"
    ):
        pairs_of_run(path, base_model="identity-1")


def test_pairs_of_the_same_base_model_are_read_if_there_are_any_and_they_fit(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.touch()
    with pytest.raises(ValueError, match=r"pairs.jsonl has no pairs; give the file of a run"):
        pairs_of_run(path, base_model="identity-1")
    for n in range(2):
        PairsFile(path).append(record(n))
    assert [pair.prompt_ids.tolist() for pair in pairs_of_run(path, base_model="identity-1", seq_len=5)] == [
        [0, 2],
        [1, 2],
    ]
    with pytest.raises(ValueError, match="line 1 is a pair of 5 tokens, and seq_len is 4"):
        pairs_of_run(path, base_model="identity-1", seq_len=4)


def test_pairs_are_kept_with_their_adapter_and_refused_where_a_run_has_it_not(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    first, second = record(0), replace(record(1), tokens=tokens_of(replace(record(1).pair, adapter=1)))
    assert "adapter" not in first.tokens
    for one in (first, second):
        PairsFile(path).append(one)
    assert [pair.adapter for pair in pairs_of_run(path, base_model="identity-1", num_adapters=2)] == [0, 1]
    with pytest.raises(ValueError, match="line 2 is a pair for adapter 1, counted from 0, and this run has 1; give"):
        pairs_of_run(path, base_model="identity-1")


def places(kept: KeptPairs, *steps: int) -> list[int]:
    return [int(pair.prompt_ids[0]) for step in steps for pair in kept.of_step(step)]


def test_every_pair_comes_once_in_an_epoch_and_each_epoch_has_an_order_of_its_own() -> None:
    kept = KeptPairs([record(n).pair for n in range(9)], max_pairs=3, seed=1)
    epochs = [places(kept, *range(first, first + 3)) for first in (1, 4, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert places(KeptPairs([record(n).pair for n in range(9)], max_pairs=3, seed=2), 1, 2, 3) != epochs[0]


def test_what_a_step_gets_depends_on_the_step_alone() -> None:
    pairs = [record(n).pair for n in range(7)]
    kept = KeptPairs(pairs, max_pairs=4, seed=1)
    later = KeptPairs(pairs, max_pairs=4, seed=1)
    assert places(later, 9, 2, 5) == [*places(kept, 9), *places(kept, 2), *places(kept, 5)]
    both = places(kept, 1, 2)  # the eighth begins the second epoch
    assert (len(both), sorted(both[:7])) == (8, list(range(7)))


def test_fewer_pairs_than_a_step_may_have_all_come_in_each() -> None:
    kept = KeptPairs([record(n).pair for n in range(3)], max_pairs=64, seed=1)
    assert [sorted(places(kept, step)) for step in (1, 2, 3)] == [[0, 1, 2]] * 3
    with pytest.raises(ValueError, match="0 pairs, of which a step gets 64, expected at least 1 each"):
        KeptPairs([], max_pairs=64, seed=1)
