"""What hints and teachers say of sampled answers, as an advantage."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from grpo.orchestrator.auxiliary.evidence import Evidence, consensus, with_evidence
from grpo.orchestrator.auxiliary.hints.contexts import HintWriter
from grpo.orchestrator.auxiliary.hints.hinting import Hinter, Hints
from grpo.orchestrator.auxiliary.hints.sources import from_templates
from grpo.orchestrator.auxiliary.preferences.agreement import Action
from grpo.orchestrator.inference.client import ServerError
from msgspec.structs import replace

from tests.orchestrator.auxiliary.hints.played import TINY, Answer, played, wrong

GROUP = [
    played("g/0", [Answer(text="a"), wrong("xy", "no", key="words"), Answer(text="b")], reward=1.0),
    played("g/1", [Answer(text="c")]),
]
"""Rewards 1 and 0: credit is 0.5 and -0.5. Each sampled token had a log-probability of -1."""


async def hints_of_group() -> Hints:
    sources = {"templates": from_templates({"words": "Spell."})}
    return (await Hinter(HintWriter(TINY), sources, seq_len=500).of_group(GROUP)).hints


async def a_quarter(ids: Sequence[int], version: int | None, temperature: float, adapter: str | None) -> list[float]:
    """Of every token, under version 1 at temperature 1."""
    assert (version, temperature, adapter) == (1, 1.0, None)
    return [-0.25] * (len(ids) - 1)


async def two_say_c(messages: Sequence[Mapping[str, Any]], tools: object) -> dict[str, Action | None]:
    return {"one": Action(text="c"), "two": Action(text="c."), "three": Action(text="d"), "absent": None}


async def test_a_credit_of_ones_own_sees_the_evidence_of_each_step() -> None:
    hints = await hints_of_group()
    evidence = Evidence(hints=0.1, teachers=0.3, score=a_quarter, answers=two_say_c, select=["low_reward"])
    found = await evidence.of_group(GROUP, hints, withheld={})
    (_, hinted, _), (asked,) = [[step.evidence for step in with_evidence(one, found).steps] for one in GROUP]
    assert hinted is not None
    assert hinted.hint_logprobs is not None
    assert hinted.hint_logprobs.tolist() == [-0.25] * 3  # x, y and the end of the turn
    assert asked is not None
    assert asked.consensus == pytest.approx(1 / 3)


async def test_what_a_hint_says_is_asked_of_the_adapter_that_sampled() -> None:
    asked = []

    async def score(ids: Sequence[int], version: int | None, temperature: float, adapter: str | None) -> list[float]:
        asked.append((version, adapter))
        return [-0.25] * (len(ids) - 1)

    evidence = Evidence(hints=0.1, teachers=0.0, score=score, adapters=["solver", "proposer"])
    steps = tuple(replace(step, adapter=1) for step in GROUP[0].steps)
    await evidence.of_group([replace(GROUP[0], steps=steps)], await hints_of_group(), withheld={})
    assert asked == [(1, "proposer")]


async def test_a_server_that_does_not_say_is_no_evidence_and_is_counted() -> None:
    async def fails(*_: object) -> list[float]:
        raise ServerError("gone")

    evidence = Evidence(hints=0.1, teachers=0.0, score=fails)
    assert await evidence.of_group(GROUP, await hints_of_group(), withheld={}) == {}
    assert evidence.metrics() == {"evidence/hinted": 0, "evidence/hints_failed": 1, "evidence/asked": 0}


async def test_nobody_is_asked_about_what_is_not_trained() -> None:
    evidence = Evidence(hints=0.1, teachers=0.3, score=a_quarter, answers=two_say_c, select=["all"])
    found = await evidence.of_group(GROUP, await hints_of_group(), withheld={"g/0": "a filter"})
    assert set(found) == {("g/1", 0)}


def test_consensus_is_one_minus_one_or_between() -> None:
    def says(*texts: str) -> float:
        return consensus({str(number): Action(text=text) for number, text in enumerate(texts)}, Action(text="x"))

    assert says("x", "X.") == 1
    assert says("y", "y") == -1
    assert says("y", "z") == -0.5
    assert says("x", "y") == 0
