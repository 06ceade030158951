"""A group's errors to hints."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.orchestrator.auxiliary.hints.contexts import HintWriter
from grpo.orchestrator.auxiliary.hints.hinting import HintedGroup, Hinter
from grpo.orchestrator.auxiliary.hints.sources import Site, Source, from_environment, from_templates
from grpo.orchestrator.rollouts.records import EpisodeResult

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


async def hinted(
    group: Sequence[EpisodeResult],
    sources: Mapping[str, Source] = BOTH,
    *,
    seq_len: int = 500,
    **options: Any,
) -> HintedGroup:
    made = await Hinter(WRITER, sources, seq_len=seq_len, **options).of_group(group)
    assert len(made.given) + sum(left_out(made).values()) == made.counts["errors"]
    return made


def left_out(made: HintedGroup) -> dict[str, int]:
    names = {name: name.removeprefix("left_out_") for name in made.counts}
    return {short: made.counts[name] for name, short in names.items() if short != name}


async def test_every_error_has_a_hint_or_a_reason() -> None:
    made = await hinted(GROUP)
    assert made.counts["errors"] == 4
    assert [(one.rollout_id, one.step, one.source, one.text) for one in made.given] == [
        ("g/0", 1, "templates", "Spell. no x"),
        ("g/0", 2, "environment", "The answer that was tried here before went wrong: no y"),
        ("g/2", 0, "templates", "Spell."),
    ]
    assert {name: num for name, num in made.counts.items() if name.startswith("declined")} == {
        "declined_off_template": 2,
        "declined_environment_silent": 1,
    }
    assert left_out(made) == {"no_source": 1}
    assert set(made.problems) == {"no_source"}
    assert set(made.hints) == {("g/0", 0), ("g/2", 0)}
    hint = made.hints["g/0", 0]
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

    made = await Hinter(WRITER, {"model": source}, seq_len=500).of_group(GROUP, withheld={"g/2": "gibberish"})
    assert asked == ["g/0", "g/0"]
    assert (left_out(made), set(made.hints)) == ({"withheld": 2}, {("g/0", 0)})


async def test_the_first_errors_of_a_row_alone_may_be_hinted() -> None:
    made = await hinted(GROUP, max_per_sample=1)
    assert [(one.rollout_id, one.step) for one in made.given] == [("g/0", 1), ("g/2", 0)]
    assert left_out(made) == {"beyond_first": 1, "no_source": 1}
    assert len(made.hints["g/0", 0].student_index) == 2
