"""docs/settings.md is what the models say."""

from pathlib import Path

from configs.help import rows
from configs.keys import known_keys
from configs.orch import OrchSettings
from tools.settings_page import reference


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run: python -m tools.settings_page > docs/settings.md"


def test_every_key_has_a_row_with_its_meaning() -> None:
    listed = {key.replace("[]", ""): meaning for key, _, _, meaning in rows(OrchSettings)}
    keys = known_keys(OrchSettings)
    assert set(listed) == {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert all(listed.values())
    assert {"filters[].type", "env[].id"} <= {key for key, *_ in rows(OrchSettings)}
