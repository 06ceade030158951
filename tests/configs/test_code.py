"""The files that settings name are part of what a run is."""

from pathlib import Path
from typing import Any

import pytest
from grpo.configs.code import digests


def names(settings: dict[str, Any]) -> set[str]:
    return set(digests(settings))


def test_code_that_settings_name_brings_what_it_imports_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "mine.py": "import json, helper\nfrom pack import part\nfrom . import beside",
        "helper.py": "import deeper",
        "deeper.py": "import mine  # a circle",
        "beside.py": "this is no Python",
        "pack/__init__.py": "",
        "pack/part.py": "from .other import x",
        "pack/other.py": "x = 1",
        "stranger.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    settings = {"env": [{"id": "reverse-text"}, {"id": "mine.py:Env"}], "loss": {"import_path": "pack.part:loss"}}
    assert names(settings) == {
        *(f"env.1.id {name}" for name in files if name != "stranger.py"),
        *(f"loss.import_path {tmp_path}/pack/{name}.py" for name in ("__init__", "part", "other")),
    }


def test_data_that_settings_name_counts_and_what_is_no_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n")
    rows = str(tmp_path / "rows.csv")
    args = {
        "path": rows,
        "split": "train",
        "url": "http://a:1/v1",
        "long": "x" * 5000,
        "none": None,
        "module": "json:x",
    }
    settings = {"env": [{"id": "dataset", "args": args}], "hints": {"templates": rows}, "name": rows}
    settings |= {"arena": "grpo.orchestrator.arena.arena:Arena", "advantage": {"import_path": "not_there:f"}}
    assert names(settings) == {f"env.0.args.path {rows}", f"hints.templates {rows}"}
