"""Texts of hints by what went wrong."""

import json
from pathlib import Path

import pytest

from orchestrator.envs.openenv import MALFORMED_ACTION, REFUSED_ACTION
from orchestrator.envs.zorplex.environment import UNKNOWN_WORD
from orchestrator.episodes.state import StepError
from orchestrator.episodes.tool_calls import ERROR_KINDS
from orchestrator.episodes.tool_episode import TOOL_ERROR, TOOL_TIMEOUT
from orchestrator.hints.templates import BUILT_IN, PLACEHOLDERS, HintsRefused, HintTemplate, HintTemplates
from orchestrator.importing import NotFound

OWN = {"words": "Spell {tool}: {message}", "tool_error": None}
NOT_A_MAPPING = ["words"]
FIELDS = {name: name.upper() for name in PLACEHOLDERS}


def error(kind: str, key: str) -> StepError:
    return StepError(error_kind=kind, hint_template_key=key, message="m")


def test_every_error_that_built_in_environments_mark_has_a_template() -> None:
    marked = {*ERROR_KINDS, TOOL_ERROR, TOOL_TIMEOUT, UNKNOWN_WORD, MALFORMED_ACTION, REFUSED_ACTION}
    assert set(BUILT_IN) == marked
    assert set(HintTemplates.loaded().keys) == marked
    assert all("MESSAGE" in HintTemplate(key, text).filled(FIELDS) for key, text in BUILT_IN.items())


def test_a_template_is_found_by_its_key_or_else_by_the_kind_of_error() -> None:
    templates = HintTemplates({"words": "by key", "unknown_word": "by kind"})
    found = [templates.of(error("unknown_word", key)) for key in ("words", "others")]
    assert [one.text for one in found if one is not None] == ["by key", "by kind"]
    assert templates.of(error("other_kind", "others")) is None


def test_placeholders_are_filled_and_doubled_braces_are_braces() -> None:
    made = HintTemplate("k", '{{"name": "{tool}"}} after {turn}: {message} ')
    assert made.filled({**FIELDS, "message": "no {tool} {here}"}) == '{"name": "TOOL"} after TURN: no {tool} {here}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("see {mesage}", r"\{mesage\} \(did you mean message\?\); there are \{message\}, "),
        ("see {}", r"placeholder \{\}; there"),
        ("{message!r}", r"\{message!r\}"),
        ("{turn:>3}", r"\{turn:>3\}"),
        ("{message.__class__}", r"\{message.__class__\}"),
        ('{"name": 1}', r'\{"name": 1\}'),
        ("a { b", "cannot be read: .*; write {{ and }}"),
        (" \n", "is empty"),
    ],
)
def test_a_text_that_nothing_can_fill_is_refused_at_once(text: str, told: str) -> None:
    with pytest.raises(HintsRefused, match=f"the hint for 'k' .*{told}"):
        HintTemplates({"k": text})


@pytest.mark.parametrize("name", ["hints.yaml", "hints.yml", "hints.json"])
def test_a_file_extends_replaces_and_takes_away(tmp_path: Path, name: str) -> None:
    own = {"words": "Spell.", "unknown_word": "Read.", "tool_error": None}
    (tmp_path / name).write_text(json.dumps(own))
    templates = HintTemplates.loaded(str(tmp_path / name))
    assert set(templates.keys) == ({*BUILT_IN, "words"} - {"tool_error"})
    found = templates.of(error("unknown_word", "unknown_word"))
    assert found is not None
    assert found.text == "Read."


def test_a_mapping_may_come_from_python(tmp_path: Path) -> None:
    for location in (f"{__name__}:OWN", f"{_own_file(tmp_path)}:OWN"):
        templates = HintTemplates.loaded(location)
        assert set(templates.keys) == ({*BUILT_IN, "words"} - {"tool_error"})


def _own_file(folder: Path) -> Path:
    path = folder / "own_hints.py"
    path.write_text(f"OWN = {OWN!r}\n")
    return path


@pytest.mark.parametrize(
    ("name", "written", "told"),
    [
        ("a.yaml", "words: a\nwords: b\n", "as YAML: the key words stands twice"),
        ("a.json", '{"words": "a", "words": "b"}', "as JSON: the key words stands twice"),
        ("a.yaml", "404: a\n", "the key 404 is no text; put it in quotes"),
        ("a.yaml", "? [a]\n: b\n", "is no text"),
        ("a.yaml", "words: {text: a}\n", "has a dict for 'words', expected a text, or null"),
        ("a.yaml", "- words\n", "is a list, expected a mapping"),
        ("a.yaml", "", "is a NoneType, expected a mapping"),
        ("a.yaml", "'': a\n", "has the key '', expected an error's hint_template_key"),
        ("a.yaml", "a: [", "cannot be read as YAML"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.json", "[" * 100_000, "cannot be read as JSON"),
        ("a.yaml", "tool_eror: null\n", r"takes away 'tool_eror' \(did you mean tool_error\?\)"),
        ("a.yaml", "words: 'see {what}'\n", r"a\.yaml': the hint for 'words' has the placeholder \{what\}"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, name: str, written: str, told: str) -> None:
    (tmp_path / name).write_text(written)
    with pytest.raises(HintsRefused, match=f"(?s)hints.templates = .*{told}"):
        HintTemplates.loaded(str(tmp_path / name), setting="hints.templates")


def test_a_location_that_leads_to_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(HintsRefused, match=r"templates = 'no/hints\.yaml': no such file /"):
        HintTemplates.loaded("no/hints.yaml")
    with pytest.raises(NotFound, match="has no OWNED"):
        HintTemplates.loaded(f"{__name__}:OWNED")
    with pytest.raises(HintsRefused, match="is a list"):
        HintTemplates.loaded(f"{__name__}:NOT_A_MAPPING")


def test_a_text_for_a_key_that_nobody_marks_is_an_error_where_the_keys_are_known(tmp_path: Path) -> None:
    path = tmp_path / "hints.yaml"
    path.write_text("wrods: Spell.\n")
    assert "wrods" in HintTemplates.loaded(str(path)).keys
    with pytest.raises(HintsRefused, match=r"'wrods' \(did you mean words\?\), which no environment marks"):
        HintTemplates.loaded(str(path), keys=["words"])
    assert "wrods" in HintTemplates.loaded(str(path), keys=["wrods"]).keys
