"""Texts of hints by what went wrong."""

import json
from pathlib import Path

import pytest
from grpo.environments.openenv import MALFORMED_ACTION, REFUSED_ACTION
from grpo.environments.zorplex import UNKNOWN_WORD
from grpo.orchestrator.auxiliary.hints.sources import BUILT_IN, load_templates, template_of
from grpo.orchestrator.rollouts.state import StepError
from grpo.orchestrator.rollouts.tool_calls import ERROR_KINDS, TOOL_ERROR
from grpo.orchestrator.rollouts.tool_episode import TOOL_TIMEOUT

OWN = {"words": 'Spell {{"x"}}: {message}', "unknown_word": "Read.", "tool_error": None}


def test_every_error_that_built_in_environments_mark_has_a_template() -> None:
    marked = {*ERROR_KINDS, TOOL_ERROR, TOOL_TIMEOUT, UNKNOWN_WORD, MALFORMED_ACTION, REFUSED_ACTION}
    assert set(BUILT_IN) == marked
    assert all("{message}" in text for text in BUILT_IN.values())


def test_a_template_is_found_by_its_key_or_else_by_the_kind_of_error() -> None:
    texts = {"words": "by key", "unknown_word": "by kind"}
    for kind, key, found in (("unknown_word", "words", "by key"), ("unknown_word", "x", "by kind"), ("y", "x", None)):
        assert template_of(texts, StepError(error_kind=kind, hint_template_key=key)) == found


@pytest.mark.parametrize("name", ["hints.yaml", "hints.json"])
def test_what_is_given_extends_replaces_and_takes_away(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(OWN))
    texts = load_templates(str(tmp_path / name))
    found = [texts.get(kind) for kind in ("words", "unknown_word", "tool_error", "unknown_tool")]
    assert found == [OWN["words"], "Read.", None, BUILT_IN["unknown_tool"]]


@pytest.mark.parametrize(
    "written", ["words: a\nwords: b\n", "[" * 5_000, "tool_eror: null\n", "words: 'see {what}'\n", "words: ' '\n"]
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, written: str) -> None:
    (tmp_path / "a.yaml").write_text(written)
    with pytest.raises(ValueError, match=r"a\.yaml"):
        load_templates(str(tmp_path / "a.yaml"))
