"""docs/coming_from.md: our side of each pair of programs is accepted, and rewards what the other side rewards."""

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grpo.configs.run import load_run
from grpo.orchestrator.rollouts.registry import make_environment

from grpo import play
from tests.pages import Page

PAGE = Page("docs/coming_from.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    PAGE.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward(env: Any, answer: str) -> float:
    return asyncio.run(play(env, env.dataset("train")[0], [answer])).reward


@pytest.mark.parametrize(
    ("file", "model", "lora"),
    [
        ("verifiers.yaml", "Qwen/Qwen3-0.6B", True),
        ("verl.yaml", "Qwen/Qwen3-0.6B", False),
        ("prime.yaml", "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT", False),
    ],
)
def test_the_run_of_the_page_is_accepted(folder: Path, file: str, model: str, lora: bool) -> None:
    run = load_run(file, [])
    assert (run.train.settings.model, run.train.settings.lora) == (model, lora)


def test_the_files_of_verl_are_read_and_scored_by_its_own_function(folder: Path) -> None:
    rows = [
        {"data_source": "codes", "prompt": [{"role": "user", "content": word}], "reward_model": {"ground_truth": word}}
        for word in ("one", "two")
    ]
    for name in ("train.parquet", "test.parquet"):
        pq.write_table(pa.Table.from_pylist([rows[name == "test.parquet"]]), name)
    [env] = load_run("verl.yaml", []).orch.settings.env
    made = make_environment(env.id, env.args)
    assert [reward(made, answer) for answer in (" one ", "two")] == [1.0, 0.0]


def test_the_environments_of_the_page_reward_right_answers(folder: Path) -> None:
    made = make_environment("my_sums.py:Sums", {})
    assert [reward(made, answer) for answer in ("0", "1")] == [1.0, 0.0]
    count = runpy.run_path("count.py")
    assert [count["right"](answer, count["rows"][1]) for answer in ("It is 1", "It is 2")] == [1.0, 0.0]
