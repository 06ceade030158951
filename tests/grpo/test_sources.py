"""Environments of scripts and notebooks reach other processes by a file and a name."""

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.rollouts.registry import make_environment
from grpo.transport.errors import UserError

from grpo import Environment, Rubric
from grpo.notebook import env_settings, source_of

CELLS = [
    "import math as m\nimport re",
    "WORDS = ['a']\nWORDS.append('b')",
    "PATTERN = re.compile('x+')\nlabel = 'not what the loop of dataset means'",
    "def half(x):\n    return m.floor(x / 2) + len(other())",
    "def other():\n    return WORDS[:0]",
    "class Mine(Environment):\n    rubric = Rubric([lambda completion: half(len(completion))])\n\n"
    "    def dataset(self, split):\n        return [{'prompt': label} for label in WORDS if not PATTERN.match(label)]",
]


def notebook(cells: list[str]) -> dict[str, Any]:
    """The globals after these cells."""
    values: dict[str, Any] = {"__name__": "__main__", "Environment": Environment, "Rubric": Rubric, "re": re}
    for cell in cells:
        exec(cell, values)
    return values


@pytest.mark.parametrize(("cells", "half"), [(CELLS, 2), ([*CELLS, "def half(x):\n    return -1"], -1)])
def test_a_cells_class_is_written_with_the_newest_of_all_that_it_names_and_nothing_else(
    tmp_path: Path, cells: list[str], half: int
) -> None:
    source = source_of("Mine", notebook(cells), cells)
    assert "label = " not in source
    (tmp_path / "mine.py").write_text(source)
    made = make_environment(f"{tmp_path}/mine.py:Mine", {})
    assert made.dataset("train") == [{"prompt": "a"}, {"prompt": "b"}]  # as WORDS is now, not as it was assigned
    assert sys.modules[type(made).__module__].half(5) == half


def test_a_value_that_no_cell_defines_is_named() -> None:
    values = notebook(CELLS) | {"PATTERN": object()}
    with pytest.raises(UserError, match="PATTERN"):
        source_of("Mine", values, [cell for cell in CELLS if "PATTERN =" not in cell])


class Shout(Environment):
    def __init__(self, words: int = 3, **more: Any) -> None:
        self.words = words

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "a"}] * self.words


class Plain(Environment):
    def dataset(self, split: str) -> list[dict[str, Any]]:
        return []


def settings(env: Any, folder: Path) -> dict[str, Any]:
    return env_settings(env, folder, overwrite=False)


def test_an_object_is_given_by_its_file_and_the_arguments_that_it_was_made_with(tmp_path: Path) -> None:
    given = settings(Shout(5, extra=[1]), tmp_path)
    assert given == {"id": f"{__name__}:Shout", "name": "Shout", "args": {"words": 5, "extra": [1]}}
    assert settings(Shout, tmp_path) == {"id": f"{__name__}:Shout", "name": "Shout"}
    assert settings("reverse-text", tmp_path) == {"id": "reverse-text"}
    assert settings({"id": "jsonl", "args": {"path": "a"}}, tmp_path) == {"id": "jsonl", "args": {"path": "a"}}
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_an_environment_does_not_take_are_an_error_as_ever() -> None:
    for made in (Plain, Shout):
        with pytest.raises(TypeError):
            made(1, 2)  # type: ignore[call-arg]


def test_what_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    class Local(Plain):
        pass

    typed_in = types.new_class("Typed", (Plain,))
    typed_in.__module__ = "__main__"
    rows = {"prompt": "a", "answer": "b"}
    for env in (Local(), Shout(extra=object()), Shout(extra={1: 2}), 5, int, rows):
        with pytest.raises(UserError):
            settings(env, tmp_path)


def test_a_script_that_would_start_its_run_again_in_each_worker_is_refused_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    lines = ["import grpo", "class Mine(grpo.Environment):", "    def dataset(self, split): return []", ""]
    call = "print(grpo.train('quickstart', env=Mine, nonsense=1))"
    for end, error in ((call, "UserError"), (f"if __name__ == '__main__':\n    {call}", "SettingsError")):
        script.write_text("\n".join([*lines, end]))
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert f"{error}: " in done.stderr, done.stderr
