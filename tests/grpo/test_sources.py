"""Environments of scripts and notebooks reach other processes by a file and a name."""

import asyncio
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from grpo.orchestrator.rollouts.registry import make_environment
from grpo.transport.errors import UserError
from grpo.transport.importing import load_object

from grpo import Environment, Rubric, play
from grpo.notebook import dataset_settings, env_settings, source_of

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


def test_a_cells_reward_function_is_written_with_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(source_of("half", notebook(CELLS), CELLS))
    half = load_object(f"{tmp_path}/half.py:half", setting="reward")
    assert half(5) == 2


def test_a_value_that_no_cell_defines_is_named() -> None:
    values = notebook(CELLS) | {"PATTERN": object()}
    with pytest.raises(UserError, match="PATTERN"):
        source_of("Mine", values, [cell for cell in CELLS if "PATTERN =" not in cell])


class Shout(Environment):
    def __init__(self, words: int = 3, **more: Any) -> None:
        self.words = words

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"prompt": "a"}] * self.words


def right(completion: str, example: Any) -> float:
    return float(completion == example["answer"])


def of_a_batch(completions: Any, **kwargs: Any) -> list[float]:
    return []


def of_columns(completion: str, answer: str) -> float:
    return 0.0


def of_others(text: str, solved: str) -> float:
    return 0.0


ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "b"},
    {"prompt": [{"role": "user", "content": "ü"}], "answer": 1},
]


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
    call, wrong = "grpo.train('quickstart', env=Mine)", "grpo.train('quickstart', env=Mine, nonsense=1)"
    for end, error in ((call, "UserError"), (f"if __name__ == '__main__':\n    {wrong}", "SettingsError")):
        script.write_text("\n".join([*lines, end]))
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert f"{error}: " in done.stderr, done.stderr


class Lazy:
    """Rows as `datasets.Dataset` gives them: one after the other, of a known number."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), pd.DataFrame(ROWS), Lazy()], ids=lambda one: type(one).__name__)
def test_rows_and_rewards_become_an_environment_that_other_processes_make(rows: Any, tmp_path: Path) -> None:
    given = dataset_settings(rows, [right, "exact"], tmp_path)
    made = make_environment(given["id"], given["args"])
    asked = sorted(
        (str(one["prompt"]), str(one["answer"])) for split in ("train", "eval") for one in made.dataset(split)
    )
    assert asked == sorted((str(one["prompt"]), str(one["answer"])) for one in ROWS)
    assert len(made.dataset("eval")) == 1  # of two rows too
    outcome = asyncio.run(play(made, {"prompt": "a", "answer": "b"}, ["b"]))
    assert outcome.metrics == {"right": 1.0, "exact": 1.0}
    assert outcome.reward == 2.0


def test_held_out_rows_are_a_split_or_an_argument_and_a_path_is_left_where_it_is(tmp_path: Path) -> None:
    for given in (
        dataset_settings({"train": ROWS[:1], "test": ROWS[1:]}, right, tmp_path / "a"),
        dataset_settings(ROWS[:1], right, tmp_path / "b", held_out=ROWS[1:]),
    ):
        made = make_environment(given["id"], given["args"])
        assert [len(made.dataset(split)) for split in ("train", "eval")] == [1, 1]
        assert made.dataset("eval")[0]["answer"] == 1
    (tmp_path / "codes.csv").write_text("prompt,answer\na,b\n")
    assert dataset_settings(tmp_path / "codes.csv", None, tmp_path / "c")["args"] == {"path": f"{tmp_path}/codes.csv"}
    assert dataset_settings("openai/gsm8k", None, tmp_path / "c")["args"] == {"path": "openai/gsm8k"}
    assert not (tmp_path / "c").exists()


def test_values_that_json_has_not_become_what_it_has_or_are_named(tmp_path: Path) -> None:
    row = {
        "prompt": "a",
        "vector": np.arange(2),
        "number": np.float32(0.5),
        "none": float("nan"),
        "at": datetime(2026, 1, 2),
    }
    given = dataset_settings([row, {"prompt": "b"}], right, tmp_path)
    first = json.loads(Path(given["args"]["path"]).read_text().splitlines()[0])
    assert first == {"prompt": "a", "vector": [0, 1], "number": 0.5, "none": None, "at": "2026-01-02T00:00:00"}
    with pytest.raises(UserError, match="row 0, column picture"):
        dataset_settings([{"prompt": "a", "picture": b"png"}], right, tmp_path)


@pytest.mark.parametrize(
    ("rows", "reward", "said"),
    [
        (ROWS, of_a_batch, r"def of_a_batch\(completion\)"),
        (ROWS, of_columns, r"def of_columns\(completion, example\)"),
        ([{"prompt": "a", "solved": "b"}], of_others, r"example\['solved'\]"),
        (ROWS, lambda completion: 0.0, "by def or class"),
        (ROWS, 5, "expected a function"),
        ([{"prompt": "a"}], None, "reward is missing"),
        ([{"question": "a"}], right, "has question, and no prompt"),
        (["a"], right, "row 0"),
        (iter(ROWS), right, "islice"),
        (ROWS[0], right, "islice"),
        ([], right, "no rows"),
    ],
)
def test_rows_and_rewards_that_cannot_be_used_are_refused_with_what_to_write(
    rows: Any, reward: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        dataset_settings(rows, reward, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    dataset_settings(ROWS, right, tmp_path)
    (tmp_path / "run.json").touch()
    dataset_settings(ROWS, right, tmp_path)
    with pytest.raises(UserError, match="output_dir"):
        dataset_settings(ROWS[:1], right, tmp_path)
    dataset_settings(ROWS[:1], right, tmp_path, overwrite=True)
