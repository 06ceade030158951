"""The built-in `jsonl`, and rewards by name."""

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from orchestrator.envs.data_files import WrongRecord
from orchestrator.envs.jsonl import Jsonl
from orchestrator.envs.rewards import REWARDS
from tests.orchestrator.rollouts.contexts import score_of


def written(path: Path, *examples: Any) -> str:
    """The path of a file with one example a line; texts are lines as they are."""
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in examples))
    return str(path)


def many(path: Path, num: int) -> str:
    return written(path, *({"prompt": f"What is {n}+1?", "answer": n + 1} for n in range(num)))


# --- the file ---


def test_splits_follow_a_hash_of_the_prompt_and_share_none(tmp_path: Path) -> None:
    environment = Jsonl(path=many(tmp_path / "data.jsonl", 500), reward="number", eval_fraction=0.2)
    train, held_out = ({example["prompt"] for example in environment.dataset(split)} for split in ("train", "eval"))
    assert not train & held_out
    assert len(train) + len(held_out) == 500
    assert 70 <= len(held_out) <= 130  # 100 ± 3.4 standard deviations of √(500 · 0.2 · 0.8)
    longer = Jsonl(path=many(tmp_path / "longer.jsonl", 600), reward="number", eval_fraction=0.2)
    assert held_out <= {example["prompt"] for example in longer.dataset("eval")}


def test_lines_of_eval_path_are_evaluated_on_and_all_others_trained_on(tmp_path: Path) -> None:
    held_out = written(tmp_path / "eval.jsonl", {"prompt": "a", "answer": "b", "level": 3})
    environment = Jsonl(path=many(tmp_path / "data.jsonl", 20), eval_path=held_out)
    assert len(environment.dataset("train")) == 20
    assert environment.dataset("eval") == [{"prompt": "a", "answer": "b", "level": 3}]


def test_rows_of_a_parquet_file_are_read_and_the_prompt_may_have_another_key(tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": str(n)}], "answer": n, "level": 1.5} for n in range(30)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    environment = Jsonl(path=str(tmp_path / "data.parquet"), prompt_key="question", reward="number")
    examples = [*environment.dataset("train"), *environment.dataset("eval")]
    assert sorted(example["answer"] for example in examples) == list(range(30))
    assert all(example["prompt"] == example["question"] and example["level"] == 1.5 for example in examples)
    with pytest.raises(WrongRecord, match=r"data\.parquet:1"):
        Jsonl(path=str(tmp_path / "data.parquet"))


async def test_an_answer_is_worth_what_the_named_reward_says(tmp_path: Path) -> None:
    environment = Jsonl(path=many(tmp_path / "data.jsonl", 50), reward="number")
    example = environment.dataset("train")[0]
    score = await score_of(environment.rubric, f"It is {example['answer']}.", example)
    assert (score.reward, score.metrics) == (1.0, {"number": 1.0})
    assert (await score_of(environment.rubric, "It is 1000", example)).reward == 0.0


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ("{'prompt': 1}", "exact"),
        ('["a"]', "exact"),
        ('{"prompt": "a", "solution": "b"}', "exact"),
        ('{"prompt": [], "answer": "b"}', "exact"),
        ('{"prompt": "a", "answer": null}', "exact"),
        ('{"prompt": "a", "answer": "two"}', "number"),
        ('{"prompt": "a", "answer": ""}', "number"),
        (r'{"prompt": [{"role": "user", "content": "\ud83d"}], "answer": "b"}', "exact"),
        (r'{"prompt": "a", "answer": "\udc00"}', "exact"),
    ],
)
def test_a_line_that_cannot_be_trained_on_is_named(tmp_path: Path, line: str, reward: str) -> None:
    path = written(tmp_path / "data.jsonl", {"prompt": "a", "answer": "1"}, "", line)
    with pytest.raises(WrongRecord, match=r"data\.jsonl:3"):
        Jsonl(path=path, reward=reward)


def test_files_that_are_away_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(WrongRecord, match=r"none\.jsonl"):
        Jsonl(path=str(tmp_path / "none.jsonl"))
    with pytest.raises(WrongRecord, match=r"data\.jsonl"):
        Jsonl(path=written(tmp_path / "data.jsonl", ""))


def test_settings_that_contradict_each_other_are_errors(tmp_path: Path) -> None:
    path = many(tmp_path / "data.jsonl", 2)
    with pytest.raises(ValueError, match="eval_path"):
        Jsonl(path=path, eval_path=path, eval_fraction=0.5)
    with pytest.raises(ValueError, match="eval_fraction"):
        Jsonl(path=path, eval_fraction=1.5)
    with pytest.raises(ValueError, match="maths"):
        Jsonl(path=path, reward="maths")
    with pytest.raises(ValueError, match="eval"):
        Jsonl(path=path, eval_fraction=1e-9).dataset("eval")


# --- rewards by name ---


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "expected"),
    [
        ("exact", " olleh\n", "olleh", 1),
        ("exact", "4", 4, 1),
        ("number", "First 7, then 1,000.", "1000", 1),
        ("number", "It is -3", "3", 0),
        ("number", "5-3 = 2", 2, 1),
        ("number", "It is 7, or 8", "7", 0),
        ("number", "version 1.2.3", "3", 0),
        ("number", "It weighs 1.5kg", "1.5", 1),
        ("number", "1,234km", 1234, 1),
        ("number", "about .5", ".5", 1),
        ("number", "\u22125", "-5", 1),
        ("number", "1.5e-3 m", "0.0015", 1),
        ("number", "1_000", "1", 0),
        ("number", "1,2345", "1", 0),
        ("number", "5, 6", "6", 1),
        ("math", "19", "19", 1),
        ("math", "18", "19", 0),
        ("math", r"So it is \boxed{\frac{1}{2}}.", "0.5", 1),
        ("math", r"$x^2 + 2x + 1$", "(x+1)^2", 1),
        ("math", "2+3", "5", 1),  # as for math-verify
        ("math", "no idea", "42", 0),
    ],
)
def test_rewards_by_hand(reward: str, completion: str, answer: Any, expected: float) -> None:
    assert REWARDS[reward](completion, {"answer": answer}) == expected


def test_mathematics_is_compared_off_the_main_thread_too() -> None:
    given: list[float] = []
    other = threading.Thread(target=lambda: given.append(REWARDS["math"](r"\boxed{3/4}", {"answer": "0.75"})))
    other.start()
    other.join(timeout=30)
    assert given == [1.0]
