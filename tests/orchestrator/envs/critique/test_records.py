"""Files of problems, and what is wrong with them."""

import json
from pathlib import Path

import pytest

from orchestrator.envs.critique.problems import UnknownRecord
from orchestrator.envs.critique.records import load_problems

RECORD = {"question": "Double n.", "inputs": ["2"], "outputs": ["4"], "program": "print(int(input()) * 2)"}


def test_a_file_has_one_problem_a_line_in_any_style(tmp_path: Path) -> None:
    unit = {"text": "Double n.", "test_list": ["assert f(2) == 4"], "code": "def f(n): return n"}
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n\n{json.dumps(unit)}\n")
    first, second = load_problems(str(tmp_path / "problems.jsonl"), "train", 0)
    assert (first.program, second.program) == ("print(int(input()) * 2)", "def f(n): return n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2 is not JSON"),
        ("[1]", r"2 is '\[1\]': expected an object"),
        ('{"question": "Double n."}', "2: a problem needs its tests"),
        (json.dumps({**RECORD, "program": None}), "2 has no candidate program"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "problems.jsonl").write_text(f"{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(UnknownRecord, match=message):
        load_problems(str(tmp_path / "problems.jsonl"), "train", 0)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text("\n")
    with pytest.raises(UnknownRecord, match="no problems in it"):
        load_problems(str(tmp_path / "problems.jsonl"), "train", 0)
