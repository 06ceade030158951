"""Pairs as tokens, and those that a run has kept."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from grpo.orchestrator.auxiliary.preferences.agreement import Action, Preference, Skipped
from grpo.orchestrator.auxiliary.preferences.pairs import (
    PairRecord,
    PairsOfRun,
    answer_ids,
    make_pair,
    pair_record,
    pairs_of_run,
)
from grpo.orchestrator.auxiliary.preferences.turns import PolicyTurn, turns_of
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.templates import ChatTemplate
from msgspec.structs import replace

from tests.orchestrator.auxiliary.preferences.test_turns import HI, TEMPLATES, rollout_of
from tests.orchestrator.chat_templates import PLAIN, renderer
from tests.orchestrator.questions import END, TEMPLATE, result

PLAIN_TEXT = ChatTemplate.of(renderer(PLAIN))


def turn(prompt: Sequence[int], rejected: Sequence[int], *, adapter: int = 0) -> PolicyTurn:
    [one] = turns_of(result("0/0", "hi", "Y"))
    rollout = replace(one.rollout, steps=(replace(one.answer, adapter=adapter),))
    row = replace(one.row, token_ids=np.array([*prompt, *rejected], np.int32))
    at = replace(one.turn, begins=len(prompt), ends=len(prompt) + len(rejected))
    return dataclasses.replace(one, rollout=rollout, row=row, turn=at)


async def tenths(token_ids: Sequence[int]) -> Sequence[float]:
    """A reference to which a token's log-probability is a tenth of its negative."""
    return [-token / 10 for token in token_ids[1:]]


async def made(text: str, at: PolicyTurn, *, sequence_len: int = 1000, reference: Any = tenths) -> PairRecord | Skipped:
    preference = Preference(chosen=Action(text=text), source="2 of 3 teachers: a, b", score_gap=0.5)
    return await make_pair(preference, at, TEMPLATE, reference, sequence_len=sequence_len, base_model="identity-1")


async def test_a_pair_is_the_prompt_the_teachers_text_and_what_the_policy_sampled_with_sums_of_the_reference() -> None:
    prompt = [257, *b"user\nhi", END, *b"\n", *TEMPLATE.opening_ids]
    found = await made("\x01\x02", turn(prompt, [3, 4, 5], adapter=1))
    assert isinstance(found, PairRecord)
    assert (found.prompt_ids, found.chosen_ids, found.rejected_ids) == (prompt, [1, 2, END], [3, 4, 5])
    assert found.chosen_ref_logprob == pytest.approx(-0.1 - 0.2 - 25.8)
    assert found.rejected_ref_logprob == pytest.approx(-0.3 - 0.4 - 0.5)
    assert (found.rejected, found.version, found.rollout_id, found.env) == ("Y", 7, "0/0", "e")
    with pytest.raises(ValueError, match="pair"):
        pair_record("{}")
    pair = pair_record(msgspec.json.encode(found)).pair
    assert pair.prompt_ids.dtype == np.int32
    assert pair.rejected_ids.tolist() == [3, 4, 5]
    assert (pair.rejected_ref_logprob, pair.score_gap, pair.adapter) == (found.rejected_ref_logprob, 0.5, 1)


async def test_pairs_that_cannot_be_trained_are_skipped_for_a_reason() -> None:
    async def reason(text: str, prompt: list[int], rejected: list[int], sequence_len: int) -> str | None:
        found = await made(text, turn(prompt, rejected), sequence_len=sequence_len)
        return found.reason if isinstance(found, Skipped) else None

    assert await reason("yes", [1, 2], [7, 8, 9], 9) is None  # 2 + 4 + 3
    assert await reason("yes", [1, 2], [7, 8, 9], 8) == "too_long"
    assert await reason("yes", [1, 2], [*b"yes", END], 100) == "same_tokens"
    assert await reason("", [1, 2], [7], 100) == "empty"
    assert await reason("yes", [1, 2], [], 100) == "empty"


@pytest.mark.parametrize("value", [ConnectionError("gone"), float("nan"), None])
async def test_a_reference_that_fails_costs_the_pair_and_nothing_else(value: object) -> None:
    async def reference(token_ids: Sequence[int]) -> list[object]:
        if isinstance(value, Exception):
            raise value
        return [value] * (len(token_ids) - 1) if value is not None else [-1.0]

    found = await made("yes", turn([1, 2], [3]), reference=reference)
    assert isinstance(found, Skipped)
    assert found.reason == "reference_failed"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answer", ["\nline ", "Ünï <b> 1"])
def test_had_the_policy_written_what_teachers_did_the_tokens_were_these(template: ChatTemplate, answer: str) -> None:
    [one] = turns_of(rollout_of(template, "x"))
    ids = answer_ids(answer, template, prompt_ids=one.prompt_ids, sampled_ids=one.sampled_ids)
    assert ids[-1] == template.end_id
    assert template.renderer.raw_text(ids[:-1]) == answer
    text = template.render([HI]) + answer
    assert [*one.prompt_ids, *ids[:-1]] == template.renderer.ids_of(text)


class Beginnings(ChatRenderer):
    """A tokenizer that marks the beginning of a text, and makes one token of two line ends."""

    def __init__(self) -> None:
        pass

    def ids_of(self, text: str) -> list[int]:
        return [1, *(99 if letter == "¶" else ord(letter) for letter in text.replace("\n\n", "¶"))]

    def without_control(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return dict(message)


def test_an_answer_is_no_beginning_of_a_text_unless_it_would_melt_into_the_opening() -> None:
    opening_ids = tuple(Beginnings().ids_of("A:\n"))
    template = ChatTemplate(renderer=Beginnings(), tools=None, opening="A:\n", opening_ids=opening_ids, end_id=2)
    opened = {"prompt_ids": [5, *opening_ids], "sampled_ids": [7]}
    assert answer_ids("yes", template, **opened) == [*b"yes", 2]
    assert answer_ids("\nyes", template, **opened) == [1, *b"\nyes", 2]


@pytest.mark.parametrize(
    ("template", "text", "sampled", "expected"),
    [
        (PLAIN_TEXT, "yes", [2, END], [*b"yes", END]),  # where plain text ends an answer, what ended the policy's does
        (PLAIN_TEXT, "yes", [2], [*b"yes"]),
        (TEMPLATE, "a<|im_end|>b", [2], [*b"a< |im_end|>b", END]),  # a teacher cannot spell out control tokens
    ],
)
def test_an_answer_ends_as_the_policys_do(
    template: ChatTemplate, text: str, sampled: list[int], expected: list[int]
) -> None:
    assert answer_ids(text, template, prompt_ids=[1], sampled_ids=sampled) == expected


# --- the pairs of another run ---


def record(number: int, **changes: object) -> PairRecord:
    made = PairRecord(
        messages=[HI],
        chosen="X",
        rejected="Y",
        source="2 of 3 teachers: a, b",
        version=number,
        rollout_id=f"{number}/0",
        env="e",
        base_model="identity-1",
        prompt_ids=[number],
        chosen_ids=[3],
        rejected_ids=[4, 5],
        chosen_ref_logprob=-0.1,
        rejected_ref_logprob=-1 / 3,
    )
    return msgspec.structs.replace(made, **changes)


def keep(folder: Path, *records: PairRecord) -> None:
    ledger = Ledger(folder / "ledger.sqlite")
    for one in records:
        ledger.pair_made(one.version, msgspec.json.encode(one).decode())
    ledger.close()


def test_the_pairs_of_another_run_are_read(tmp_path: Path) -> None:
    keep(tmp_path, record(1), record(2))
    pairs = pairs_of_run(tmp_path, base_model="identity-1", seq_len=4)
    assert [pair.prompt_ids.tolist() for pair in pairs] == [[1], [2]]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([], "pairs"),
        ([record(1, base_model="identity-2")], "identity-2"),
        ([record(1, adapter=1)], "adapter"),
        ([record(1, prompt_ids=[1, 2])], "seq_len"),
    ],
)
def test_pairs_that_this_run_cannot_train_are_refused(tmp_path: Path, records: list[PairRecord], told: str) -> None:
    with pytest.raises(ValueError, match="run"):
        pairs_of_run(tmp_path, base_model="identity-1", seq_len=4)
    assert not list(tmp_path.iterdir())
    keep(tmp_path, *records)
    with pytest.raises(ValueError, match=told):
        pairs_of_run(tmp_path, base_model="identity-1", seq_len=4)


def test_kept_pairs_come_in_an_order_by_lot_each_once_in_a_round() -> None:
    pairs = [record(number).pair for number in range(10)]
    kept = PairsOfRun(pairs, max_pairs=4, seed=1)
    drawn = [pair.prompt_ids[0] for step in range(1, 6) for pair in kept.before_batch(step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [*range(10)]
    assert drawn[:10] != drawn[10:]
    assert len(PairsOfRun(pairs, max_pairs=64, seed=1).before_batch(1)) == 10
