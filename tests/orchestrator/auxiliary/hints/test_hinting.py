"""A group's errors to hints."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from grpo.orchestrator.auxiliary.hints.advantages import HintAdvantages, Score
from grpo.orchestrator.auxiliary.hints.contexts import HintWriter
from grpo.orchestrator.auxiliary.hints.hinting import Hinter
from grpo.orchestrator.auxiliary.hints.sources import Site, Source, from_environment, from_templates
from grpo.orchestrator.inference.client import ServerError
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import ScoredGroup
from msgspec.structs import replace

from tests.orchestrator.auxiliary.hints.played import TINY, Answer, played, wrong

WRITER = HintWriter(TINY)
WORDS = from_templates({"words": "Spell. {message}"})
BOTH: dict[str, Source] = {"templates": WORDS, "environment": from_environment}
GROUP = [
    played("g/0", [Answer(text="a"), wrong("x", "no x", key="words"), wrong("y", "no y")]),
    played("g/1", [Answer(text="a")], reward=1.0),
    played("g/2", [wrong("z", "", key="words")], children=[played("g/2.0", [wrong("u", "")])]),
]
"""Four errors: two that a template is for, one of which the environment speaks, one of which nobody does."""


async def hinted(sources: Mapping[str, Source] = BOTH, **options: Any) -> tuple[ScoredGroup, dict[str, float]]:
    """What becomes of GROUP, and what is counted."""
    group = ScoredGroup(GROUP, withheld=options.pop("withheld", {}))
    hinter = Hinter(WRITER, sources, seq_len=500, **options)
    await hinter.before_credit(group)
    counts = {name.removeprefix("hints/"): num for name, num in hinter.figures().counts.items()}
    assert counts["given"] + sum(left_out(counts).values()) == counts["errors"]
    return group, counts


def left_out(counts: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("left_out_"): num for name, num in counts.items() if name.startswith("left_out_")}


async def test_every_error_has_a_hint_or_a_reason() -> None:
    group, counts = await hinted()
    assert group.hint_texts == {
        ("g/0", 1): "Spell. no x",
        ("g/0", 2): "The answer that was tried here before went wrong: no y",
        ("g/2", 0): "Spell.",
    }
    given = {"errors": 4, "given": 3, "given_templates": 2, "given_environment": 1}
    assert counts == given | {"declined_off_template": 2, "declined_environment_silent": 1, "left_out_no_source": 1}
    assert set(group.fields) == {("g/0", 0), ("g/2", 0)}
    hint = group.fields["g/0", 0]["hint"]
    row = GROUP[0].rows[0]
    assert row.token_ids[hint.student_index].tolist() == [*b"x", 258, *b"y", 258]
    assert hint.teacher_token_ids[hint.teacher_index].tolist() == [*b"x", 258, *b"y", 258]
    text = TINY.renderer.raw_text(hint.teacher_token_ids.tolist())
    assert "go on<|im_end|>\n<|im_start|>user\nSpell. no x<|im_end|>\n<|im_start|>assistant\nx<|im_end|>" in text


async def test_nobody_is_asked_for_hints_for_what_is_withheld() -> None:
    asked = []

    async def source(site: Site) -> str:
        asked.append(site.rollout.id)
        return "Spell."

    group, counts = await hinted({"model": source}, withheld={"g/2": "gibberish"})
    assert asked == ["g/0", "g/0"]
    assert (left_out(counts), set(group.fields)) == ({"withheld": 2}, {("g/0", 0)})


async def test_the_first_errors_of_a_row_alone_may_be_hinted() -> None:
    group, counts = await hinted(max_per_sample=1)
    assert set(group.hint_texts) == {("g/0", 1), ("g/2", 0)}
    assert left_out(counts) == {"beyond_first": 1, "no_source": 1}
    assert len(group.fields["g/0", 0]["hint"].student_index) == 2


# --- as an advantage ---


async def advantaged(score: Score, group: list[EpisodeResult] = GROUP) -> tuple[ScoredGroup, dict[str, float]]:
    """What becomes of a group whose hints weigh 0.1 as an advantage and are no loss, and what is counted."""
    scored = ScoredGroup(group)
    advantages = HintAdvantages(0.1, score, adapters=["solver", "proposer"])
    hinter = Hinter(WRITER, {"templates": WORDS}, seq_len=500, is_trained=lambda: False, advantages=advantages)
    await hinter.before_credit(scored)
    assert not scored.fields
    return scored, dict(hinter.figures().counts)


async def test_what_a_hint_says_is_asked_of_the_adapter_that_sampled_and_is_added_to_its_step() -> None:
    asked = []

    async def a_quarter(ids: Sequence[int], *how: object) -> list[float]:
        asked.append(how)
        return [-0.25] * (len(ids) - 1)

    steps = tuple(replace(step, adapter=1) for step in GROUP[0].steps)
    group, counts = await advantaged(a_quarter, [replace(GROUP[0], steps=steps)])
    assert asked == [(1, 1.0, "proposer")]
    assert group.added["g/0", 1].tolist() == pytest.approx([0.1 * (1 - 0.25)] * 2)  # x and the end of the turn, at -1
    told = group.evidence["g/0", 1].hint_logprobs
    assert told is not None
    assert told.tolist() == [-0.25] * 2
    assert (counts["evidence/hinted"], counts["evidence/hints_failed"]) == (1, 0)


async def test_a_server_that_does_not_say_is_no_evidence_and_is_counted() -> None:
    async def fails(*_: object) -> list[float]:
        raise ServerError("gone")

    group, counts = await advantaged(fails)
    assert (group.added, group.evidence) == ({}, {})
    assert (counts["evidence/hinted"], counts["evidence/hints_failed"]) == (0, 2)
