"""One example is scored with an empty answer before servers are there: what that refuses, and what it lets pass."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo.orchestrator.rollouts.context import CallFailed
from grpo.orchestrator.rollouts.rubric import Rubric
from grpo.orchestrator.run import orchestrate
from grpo.orchestrator.workers.failures import EnvironmentFailed
from grpo.orchestrator.workers.trial import AWAY, BROKEN, Watched, reason_of_trial

from tests.orchestrator.fakes import FakeServer, FakeTrainer, settings_for
from tests.orchestrator.rollouts.contexts import OpenBackend, context_on
from tests.orchestrator.running import rewarded, run

EXAMPLES = [{"prompt": "?", "answer": "a"}, {"prompt": "?", "answer": "b", "hard": True}]


def away(completion: str) -> float:
    raise CallFailed("the judge does not answer")


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda completion, example: float(completion == example["anser"]), BROKEN),
        (lambda completion, example: float(completion == example.answer), BROKEN),
        (lambda completion, example: float(compleshun == example["answer"]), BROKEN),  # type: ignore[name-defined]  # noqa: F821
        (lambda completion, state: float(state.last_txt == ""), BROKEN),
        (lambda completion: float(completion.stripped() == ""), BROKEN),
        (lambda completion: re.serch("a", completion), BROKEN),  # type: ignore[attr-defined]
        (lambda completion: away(completion, 1), BROKEN),  # type: ignore[call-arg]
        (lambda completion: __import__("no_such_module"), BROKEN),
        # What another example, or another answer, may do better.
        (lambda completion, example: float(example["hard"]), None),
        (lambda completion, example: float(re.search("a", completion).group() == "a"), None),  # type: ignore[union-attr]
        (lambda completion: json.loads(completion)["answer"], None),
        (lambda completion: dict[str, float]()["answer"], None),
        (lambda completion: {"yes": 1.0, "no": 0.0}[completion], None),
        (lambda completion: float(completion), None),
        (lambda completion: float(completion.split()[0]), None),
        (lambda completion: None, None),
        (away, AWAY),
    ],
)
async def test_only_what_no_answer_can_explain_is_refused(reward: Callable[..., Any], reason: str | None) -> None:
    ctx = context_on(OpenBackend(), example=(example := Watched(EXAMPLES[0])))
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what user code raises
        await Rubric([reward]).score(ctx.state, ctx)
    assert reason_of_trial(raised.value, example, EXAMPLES) == reason


async def test_a_misspelt_field_ends_the_start_before_any_server_is_there(tmp_path: Path) -> None:
    env = rewarded(tmp_path, 'return float(completion == example["anser"])')
    nowhere = FakeServer()
    nowhere.url = "http://127.0.0.1:9"
    trainer, since_s = FakeTrainer(tmp_path / "run"), time.monotonic()
    trainer.start()
    with pytest.raises(EnvironmentFailed, match=r"(?s)rewarded\.py.*KeyError: 'anser'"):
        await orchestrate(settings_for(tmp_path / "run", nowhere, env=env))
    assert time.monotonic() - since_s < 50  # client.timeout, for which servers are waited for, is 60
    trainer.end()


@pytest.mark.parametrize(
    ("body", "warning"),
    [
        ("return float(completion)", "could not convert string to float"),
        ("return 1.0 if completion else os._exit(3)", ""),
    ],
    ids=["breaks", "ends its worker"],
)
async def test_a_reward_that_an_empty_answer_breaks_is_warned_of_and_the_run_goes_on(
    tmp_path: Path, server: FakeServer, caplog: pytest.LogCaptureFixture, body: str, warning: str
) -> None:
    server.answer = lambda prompt, version: "1"
    made = await run(tmp_path / "run", server, env=rewarded(tmp_path, body), max_steps=1, eval={"num_examples": 4})
    assert (made.summary.rollouts_trained, made.summary.rollouts_dropped) == (16, {})
    assert any(warning in record.message for record in caplog.records)
