"""docs/settings.md is what the models say."""

from pathlib import Path

from configs.keys import known_keys
from configs.orch import OrchSettings
from configs.reference import reference, rows


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == reference(), "run: python -m configs.reference > docs/settings.md"


def test_every_key_has_a_row_with_its_meaning() -> None:
    listed = {key.replace("[]", ""): meaning for key, _, _, meaning in rows(OrchSettings)}
    leaves = [
        key for key in known_keys(OrchSettings) if not any(k.startswith(f"{key}.") for k in known_keys(OrchSettings))
    ]
    assert sorted(listed) == sorted(leaves)
    assert all(listed.values())


def test_only_what_is_a_list_is_marked_as_one() -> None:
    keys = {key for key, *_ in rows(OrchSettings)}
    assert {"filters[].type", "env[].id", "sampling.temp_scheduler.type", "eval.env[].id"} <= keys
