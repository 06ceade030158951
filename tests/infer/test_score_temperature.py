"""Each request's logits divided by its own temperature, in stand-ins for vLLM's two model runners.

The vocabulary has 2 tokens and the logits of a row h are (h, 0), so that the log-probability of token 0 at temperature
t is -log(1 + exp(-h / t)).
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grpo.infer.score_temperature import KEY, install


def params(temperature: float | None) -> Any:
    return SimpleNamespace(extra_args=None if temperature is None else {"other": 1, KEY: temperature})


def logprob(h: float, temperature: float) -> float:
    return -math.log(1 + math.exp(-h / temperature))


def logits_of(hidden: torch.Tensor) -> torch.Tensor:
    return torch.stack([hidden, torch.zeros_like(hidden)], dim=1)


class Sampler:
    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(dim=-1, dtype=torch.float32)


class FirstRunner:
    """Has scored requests one by one, and forgets those that are through."""

    def __init__(self, temperatures: dict[str, float | None]) -> None:
        self.requests = {name: SimpleNamespace(sampling_params=params(t)) for name, t in temperatures.items()}
        self.num_prompt_logprobs = dict.fromkeys(temperatures, 0)
        self.sampler = Sampler()
        self.num_calls = 0

    def _get_prompt_logprobs_dict(self, hidden: dict[str, float], through: dict[str, bool]) -> dict[str, list[float]]:
        self.num_calls += 1
        waiting = self.num_prompt_logprobs
        found = {}
        for name in list(waiting):
            if name in hidden:
                found[name] = self.sampler.compute_logprobs(logits_of(torch.tensor([hidden[name]])))[:, 0].tolist()
                if through[name]:
                    del waiting[name]
        return found


def test_requests_of_several_temperatures_in_one_step_have_each_its_own() -> None:
    runner = FirstRunner({"a": 0.5, "b": None, "c": 2.0, "d": 0.5, "away": 2.0})
    waiting = runner.num_prompt_logprobs
    install(runner)
    hidden = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    found: Any = runner._get_prompt_logprobs_dict(hidden, {"a": True, "b": False, "c": True, "d": False})
    right = {name: logprob(hidden[name], t) for name, t in {"a": 0.5, "b": 1.0, "c": 2.0, "d": 0.5}.items()}
    assert {name: value[0] for name, value in found.items()} == pytest.approx(right, abs=1e-6)
    assert runner.num_prompt_logprobs is waiting
    assert waiting == {"b": 0, "d": 0, "away": 0}
    assert "compute_logprobs" not in vars(runner.sampler)


class Worker:
    """Of the second runner: all rows together, in pieces of 2."""

    def __init__(self) -> None:
        self.added: list[tuple[str, int]] = []
        self.piece = 2

    def add_request(self, name: str, place: int, _: Any) -> None:
        self.added.append((name, place))

    def compute_prompt_logprobs(self, logits_fn: Any, hidden: torch.Tensor, batch: Any, *_: Any) -> dict[str, Any]:
        parts = [logits_fn(hidden[i : i + self.piece]) for i in range(0, batch.num_tokens, 2)]
        logprobs = torch.cat(parts).log_softmax(-1)[:, 0]
        starts = batch.query_start_loc_np
        return {name: logprobs[starts[i] : starts[i + 1]].tolist() for i, name in enumerate(batch.req_ids)}


def together(temperatures: dict[str, float | None]) -> tuple[Any, Any, torch.Tensor]:
    """A runner's worker with requests of 1, 2, 3, … rows in places 5, 4, …, their batch, and its hidden states, of
    which the last are padding."""
    runner: Any = SimpleNamespace(prompt_logprobs_worker=Worker())
    install(runner)
    places = [5 - i for i in range(len(temperatures))]
    for place, (name, temperature) in zip(places, temperatures.items(), strict=True):
        runner.prompt_logprobs_worker.add_request(name, place, params(temperature))
    starts = np.cumsum([0, *range(1, len(places) + 1)], dtype=np.int32)
    batch = SimpleNamespace(
        req_ids=list(temperatures), idx_mapping_np=np.array(places), query_start_loc_np=starts, num_tokens=starts[-1]
    )
    return runner.prompt_logprobs_worker, batch, torch.arange(1.0, starts[-1] + 3)


def test_each_row_of_a_step_has_the_temperature_of_its_request() -> None:
    worker, batch, hidden = together({"a": 0.5, "b": None, "c": 2.0})
    found = worker.compute_prompt_logprobs(logits_of, hidden, batch, "tokens", "computed", "lens")
    assert found["a"] == pytest.approx([logprob(1, 0.5)])
    assert found["b"] == pytest.approx([logprob(2, 1), logprob(3, 1)])
    assert found["c"] == pytest.approx([logprob(4, 2), logprob(5, 2), logprob(6, 2)])
    assert worker.added == [("a", 5), ("b", 4), ("c", 3)]


def test_a_request_does_not_inherit_the_temperature_of_the_one_before_in_its_place() -> None:
    worker, batch, hidden = together({"a": 0.5, "b": 2.0})
    for name, place in (("c", 5), ("d", 4)):
        worker.add_request(name, place, params(None))
    batch.req_ids = ["c", "d"]
    found = worker.compute_prompt_logprobs(logits_of, hidden, batch)
    assert found["c"] + found["d"] == pytest.approx([logprob(h, 1) for h in (1, 2, 3)])


def test_a_runner_that_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="SimpleNamespace"):
        install(SimpleNamespace(sampler=Sampler(), requests={}))
