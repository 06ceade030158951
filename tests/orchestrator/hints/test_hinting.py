"""A group's errors to hints."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from orchestrator.advantage import GroupCredit
from orchestrator.episodes.records import EpisodeResult, walk_all
from orchestrator.hints.hinting import BEYOND_FIRST, NO_SOURCE, NOT_WRITTEN, HintedGroup, Hinter
from orchestrator.hints.pairs import EMPTY_ANSWER, NO_BOUNDARY, TOO_LONG
from orchestrator.hints.sources import (
    MODEL_FAILED,
    OFF_TEMPLATE,
    SILENT,
    FromEnvironment,
    FromModel,
    FromSiblings,
    FromTemplates,
    HintSource,
    Site,
)
from orchestrator.hints.templates import HintTemplates
from orchestrator.hints.writing import HintWriter
from orchestrator.samples import training_samples
from tests.orchestrator.hints.played import TINY, Answer, played, wrong

WRITER = HintWriter.of(TINY)
WORDS = FromTemplates(HintTemplates({"words": "Spell. {message}"}))
ALL = [WORDS, FromEnvironment()]
GROUP = [
    played("g/0", [Answer(text="a"), wrong("x", "no x", key="words"), wrong("y", "no y")]),
    played("g/1", [Answer(text="a")], reward=1.0),
    played("g/2", [wrong("z", "", key="words")], children=[played("g/2.0", [wrong("u", "")])]),
]
"""Four errors: two that a template is for, one of which the environment speaks, one of which nobody does."""


async def hinted(
    group: Sequence[EpisodeResult], sources: Sequence[HintSource] = ALL, *, seq_len: int = 500, **options: Any
) -> HintedGroup:
    made = await Hinter(WRITER, sources, seq_len=seq_len, **options).of_group(group)
    assert len(made.given) + sum(made.left_out.values()) == made.num_errors
    return made


async def test_every_error_has_a_hint_or_a_reason() -> None:
    made = await hinted(GROUP, weight=0.5)
    assert made.num_errors == 4
    assert [(one.rollout_id, one.step, one.source, one.text) for one in made.given] == [
        ("g/0", 1, "templates", "Spell. no x"),
        ("g/0", 2, "environment", "The answer that was tried here before went wrong: no y"),
        ("g/2", 0, "templates", "Spell."),
    ]
    assert made.given[0].error == GROUP[0].rollout.steps[1].error
    assert made.declined == {OFF_TEMPLATE: 2, SILENT: 1}
    assert made.left_out == {NO_SOURCE: 1}
    assert set(made.problems) == {NO_SOURCE}
    assert (
        "'unknown_tool' with hint_template_key 'unknown_tool' (off_template, environment_silent)"
        in (made.problems[NO_SOURCE])
    )
    assert set(made.hints) == {("g/0", 0), ("g/2", 0)}
    hint = made.hints["g/0", 0]
    row = GROUP[0].rollout.rows[0].row
    assert row.token_ids[hint.student_index].tolist() == [*b"x", 258, *b"y", 258]
    assert hint.teacher_token_ids[hint.teacher_index].tolist() == [*b"x", 258, *b"y", 258]
    text = TINY.renderer.raw_text(hint.teacher_token_ids.tolist())
    assert "go on<|im_end|>\n<|im_start|>user\nSpell. no x<|im_end|>\n<|im_start|>assistant\nx<|im_end|>" in text
    assert hint.weight == 0.5


async def test_hints_fit_the_samples_of_their_rows() -> None:
    made = await hinted(GROUP)
    samples = training_samples(GROUP, GroupCredit(), group="g")
    places = [(one.id, number) for one in walk_all(GROUP) for number, _ in enumerate(one.rows)]
    for place, sample in zip(places, samples, strict=True):
        if (hint := made.hints.get(place)) is not None:
            with_hint = structs.replace(sample, hint=hint)
            assert with_hint.loss_mask[hint.student_index].all()
            same = with_hint.token_ids[hint.student_index] == hint.teacher_token_ids[hint.teacher_index]
            assert np.all(same)


async def test_the_first_errors_of_a_row_alone_may_be_hinted() -> None:
    made = await hinted(GROUP, first=1)
    assert [(one.rollout_id, one.step) for one in made.given] == [("g/0", 1), ("g/2", 0)]
    assert made.left_out == {BEYOND_FIRST: 1, NO_SOURCE: 1}
    assert len(made.hints["g/0", 0].student_index) == 2


async def test_until_the_end_everything_after_an_error_is_compared() -> None:
    made = await hinted(GROUP[:1], [WORDS], until_end=True)
    row = GROUP[0].rollout.rows[0].row
    assert row.token_ids[made.hints["g/0", 0].student_index].tolist() == [*b"x", 258, *b"y", 258]
    assert made.declined == {OFF_TEMPLATE: 1}


async def test_a_hint_that_is_longer_than_the_sequence_allows_is_left_out() -> None:
    long = played("g/0", [wrong("x", "m" * 900, key="words"), wrong("y", "no y", key="words")])
    made = await hinted([long])
    assert made.left_out == {TOO_LONG: 1}
    assert [one.text for one in made.given] == ["Spell. no y"]
    assert len(made.hints["g/0", 0].teacher_token_ids) <= 500
    # <|im_start|>user\nq<|im_end|>\n, the hint <|im_start|>user\nSpell. mmm…<|im_end|>\n, and
    # <|im_start|>assistant\nx<|im_end|>: 9 + (8 + 7 + 900) + 13 = 937
    assert "answer 1 of a rollout of shop" in made.problems[TOO_LONG]
    assert "915 tokens make the context 937 tokens long" in made.problems[TOO_LONG]
    assert "seq_len is 500; shorten the hint" in made.problems[TOO_LONG]
    none = await hinted([long], seq_len=20)
    assert (none.hints, none.left_out) == ({}, {TOO_LONG: 2})


class Blank(HintSource):
    """Texts of which no message can be made."""

    name = "blank"

    async def text(self, site: Site) -> str:
        return " "


async def test_what_cannot_be_written_or_has_no_place_is_left_out() -> None:
    unwritten = await hinted([played("a", [wrong("x")])], [Blank()])
    assert unwritten.left_out == {NOT_WRITTEN: 1}
    assert "makes no message: a hint without text" in unwritten.problems[NOT_WRITTEN]
    error = wrong("").error
    nothing = played("a", [Answer(text="", error=error, whole=False)])
    assert (await hinted([nothing])).left_out == {EMPTY_ANSWER: 1}
    unopened = replace(TINY, opening="", opening_ids=(0,))
    elsewhere = played("a", [wrong("x")], template=unopened)
    assert (await hinted([elsewhere])).left_out == {NO_BOUNDARY: 1}


async def test_siblings_that_know_no_better_are_no_problem_and_a_model_that_fails_is_one() -> None:
    async def ask(messages: object, /) -> str:
        raise OSError("connection refused")

    alone = [played("a", [wrong("x")])]
    assert (await hinted(alone, [FromSiblings(min_reward=1.0)])).problems == {}
    failed = await hinted(alone, [FromModel(ask, TINY.renderer), FromEnvironment()])
    assert failed.problems == {
        MODEL_FAILED: "the model that writes hints failed: OSError: connection refused",
    }
    assert len(failed.given) == 1


async def test_without_errors_nobody_is_asked() -> None:
    async def ask(messages: object, /) -> str:
        raise AssertionError("asked")

    made = await hinted([played("a", [Answer(text="x")])], [FromModel(ask, TINY.renderer)])
    assert (made.hints, made.num_errors, made.declined, made.left_out) == ({}, 0, {}, {})


async def test_sources_are_asked_in_their_order() -> None:
    group = [played("g/0", [wrong("x", key="words")]), played("g/1", [Answer(text="w")], reward=1.0)]
    siblings = FromSiblings(min_reward=0.5)
    for sources in ([siblings, WORDS], [WORDS, siblings]):
        made = await hinted(group, sources)
        assert [one.source for one in made.given] == [sources[0].name]
        assert made.declined == {}


async def test_a_template_that_nothing_fills_leaves_the_error_to_the_next_source() -> None:
    group = [played("g/0", [wrong("x", "", key="words")]), played("g/1", [Answer(text="w")], reward=1.0)]
    bare = FromTemplates(HintTemplates({"words": "{message}"}))
    made = await hinted(group, [bare, FromSiblings(min_reward=0.5)])
    assert ([one.source for one in made.given], made.declined, made.problems) == (["sibling"], {SILENT: 1}, {})


@pytest.mark.parametrize(
    ("sources", "options", "told"),
    [
        ([], {}, "expected one source"),
        ([WORDS, WORDS], {}, "several different"),
        (ALL, {"seq_len": 0}, "seq_len is 0"),
        (ALL, {"first": 0}, "first is 0"),
        (ALL, {"weight": 0.0}, "above 0"),
        (ALL, {"weight": float("nan")}, "finite"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    sources: Sequence[HintSource], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Hinter(WRITER, sources, **{"seq_len": 100, **options})
