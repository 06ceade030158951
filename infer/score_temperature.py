"""Log-probabilities of given tokens at a temperature, inside vLLM's engine process.

vLLM takes `prompt_logprobs` of the logits before any processing, temperature included. Here each request's logits z are
divided by its own temperature t before: log softmax(z / t), in float32, as vLLM's sampler does with the tokens that it
samples. The request carries t in its parameters' `extra_args`. Requests at 1 cost a look at it.

vLLM has two model runners, and their ways are different; versions 0.24 to 0.32 have the same two. The second, which it
prefers on GPUs, is not yet run here: it needs Triton.

The module imports no vLLM.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

KEY = "grpo_score_temperature"
"""In `extra_args` of a request's sampling parameters."""

Compute = Callable[..., dict[str, Any]]


def temperature_in(params: Any) -> float:
    """At which a request with these parameters (None: a pooling request's) is scored."""
    extra: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    return float(extra.get(KEY, 1.0))


def install(runner: Any) -> bool:
    """Let a model runner of vLLM score each request at its own temperature; False, and nothing done, where it is
    neither of the two that are known."""
    if _has(runner, "_get_prompt_logprobs_dict", "num_prompt_logprobs", "requests") and _has(
        getattr(runner, "sampler", None), "compute_logprobs"
    ):
        runner._get_prompt_logprobs_dict = OneByOne(runner, runner._get_prompt_logprobs_dict)
        return True
    worker = getattr(runner, "prompt_logprobs_worker", None)
    if _has(worker, "add_request", "compute_prompt_logprobs"):
        Together(worker)
        return True
    return False


def _has(holder: Any, *names: str) -> bool:
    return all(hasattr(holder, name) for name in names)


class OneByOne:
    """In the place of the first runner's `_get_prompt_logprobs_dict`, which goes through the requests of a step and
    computes each one's logits by itself. It is called once for each temperature, and sees the requests of that one."""

    def __init__(self, runner: Any, compute: Compute) -> None:
        self._runner, self._compute = runner, compute

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        runner = self._runner
        waiting: dict[str, int] = runner.num_prompt_logprobs
        by_temperature: dict[float, dict[str, int]] = {}
        for name, num in waiting.items():
            by_temperature.setdefault(temperature_in(runner.requests[name].sampling_params), {})[name] = num
        if by_temperature.keys() <= {1.0}:
            return self._compute(*args, **kwargs)
        computed: dict[str, Any] = {}
        try:
            for temperature, some in by_temperature.items():
                runner.num_prompt_logprobs = left = dict(some)
                with _divided(runner.sampler, temperature):
                    computed |= self._compute(*args, **kwargs)
                for name in some.keys() - left.keys():  # it takes out those that are through
                    del waiting[name]
        finally:
            runner.num_prompt_logprobs = waiting
        return computed


@contextmanager
def _divided(sampler: Any, temperature: float) -> Iterator[None]:
    """Within it, the sampler divides logits by the temperature."""
    own = sampler.compute_logprobs
    sampler.compute_logprobs = lambda logits: own(logits.float() / temperature)
    try:
        yield
    finally:
        del sampler.compute_logprobs


class Together:
    """Around the second runner's PromptLogprobsWorker, which computes the logits of all tokens of a step in pieces, in
    their order: each row is divided by its request's temperature."""

    def __init__(self, worker: Any) -> None:
        self._add: Callable[..., None] = worker.add_request
        self._compute: Compute = worker.compute_prompt_logprobs
        self._temperatures: dict[int, float] = {}
        """Of the runner's places for requests; those not at 1. Each new request sets its place's anew."""
        worker.add_request, worker.compute_prompt_logprobs = self.add_request, self.compute_prompt_logprobs

    def add_request(self, name: str, place: int, params: Any) -> None:
        """Takes the place of the worker's."""
        self._temperatures.pop(place, None)
        if (temperature := temperature_in(params)) != 1.0:
            self._temperatures[place] = temperature
        self._add(name, place, params)

    def compute_prompt_logprobs(
        self, logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, batch: Any, *args: Any
    ) -> dict[str, Any]:
        """Takes the place of the worker's; `hidden` [T, H] are the step's tokens, of which it may ask none or all."""
        temperatures = [self._temperatures.get(int(place), 1.0) for place in batch.idx_mapping_np]
        if all(temperature == 1.0 for temperature in temperatures):
            return self._compute(logits_of, hidden, batch, *args)
        starts = torch.as_tensor(batch.query_start_loc_np)[: len(temperatures) + 1]
        of_rows = torch.tensor(temperatures).repeat_interleave(starts.diff())[:, None].to(hidden.device)
        num_done = 0

        def divided(part: torch.Tensor) -> torch.Tensor:
            nonlocal num_done
            num_done += len(part)
            return logits_of(part).float() / of_rows[num_done - len(part) : num_done]

        computed = self._compute(divided, hidden, batch, *args)
        if num_done not in (0, len(of_rows)):
            raise RuntimeError(f"vLLM scored {num_done} of a step's {len(of_rows)} tokens, expected all or none")
        return computed
