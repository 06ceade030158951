"""Runs in which a model revises: the policy's own base, and another one behind an OpenAI-compatible server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.run import orchestrate
from tests.orchestrator.chat_server import chat_serving
from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from tests.orchestrator.sandbox.conftest import needs_bubblewrap

__all__ = ["needs_bubblewrap"]

REVISION = "So be it:\n```python\nprint(int(input()) * 2)\n```"


@pytest.fixture
def problems(tmp_path: Path, needs_bubblewrap: None) -> str:
    """A file with three programs, of which all double wrongly."""
    tests = {"inputs": ["1", "4"], "outputs": ["2", "8"]}
    rows = [{"question": f"Double n ({n}).", "program": f"print(int(input()) + {n})", **tests} for n in range(3)]
    (tmp_path / "problems.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(tmp_path / "problems.jsonl")


async def trained(folder: Path, problems: str, reviser: Any, answer: Callable[[str, int], str]) -> Any:
    server = await FakeServer(answer, max_model_len=4096).start()
    FakeTrainer(folder / "run", settings={"sequence_len": 4096}).start()
    args = {"problems": problems, "eval_problems": problems, "reviser": reviser}
    changes = {"seq_len": 4096, "sampling": {"max_tokens": 64}, "max_steps": 1, "reward_timeout_s": 60}
    summary = await orchestrate(settings_for(folder / "run", server, env=[{"id": "critique", "args": args}], **changes))
    await server.stop()
    return summary, server.requests


async def test_the_model_before_training_revises(tmp_path: Path, problems: str) -> None:
    asked: list[str] = []

    def answer(prompt: str, version: int) -> str:
        if version is not None:
            return "Use *. Overall judgment: Incorrect"
        asked.append(prompt)
        return REVISION

    summary, _ = await trained(tmp_path, problems, "base", answer)
    assert (summary.reward_last, summary.accuracy_after, summary.rollouts_dropped) == (1.0, 1.0, {})
    assert asked
    assert all("Use *. Overall judgment: Incorrect" in prompt for prompt in asked)


async def test_a_model_of_another_server_revises(tmp_path: Path, problems: str) -> None:
    async with chat_serving() as other:
        other.does["strong"] = lambda messages: REVISION
        reviser = {"base_url": other.base_url, "model": "strong"}
        summary, requests = await trained(
            tmp_path, problems, reviser, lambda prompt, version: "Overall judgment: Incorrect"
        )
        assert other.num_requests("strong") > 0
    assert (summary.reward_last, summary.rollouts_dropped) == (1.0, {})
    assert all(request["version"] is not None for request in requests)
