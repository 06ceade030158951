"""docs/settings.md is what the models say."""

from pathlib import Path

from configs.keys import known_keys, sections_of
from configs.orch import OrchSettings
from configs.reference import reference, rows


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run: python -m configs.reference > docs/settings.md"


def test_every_key_has_a_row_with_its_meaning() -> None:
    listed = {key.replace("[]", ""): meaning for key, _, _, meaning in rows(OrchSettings)}
    assert set(listed) == {key for key, field in known_keys(OrchSettings) if not sections_of(field.annotation)}
    assert all(listed.values())
    assert {"filters[].type", "env[].id"} <= {key for key, *_ in rows(OrchSettings)}
