"""Log-probabilities of given tokens at a temperature, inside vLLM's engine process.

vLLM takes `prompt_logprobs` of the unprocessed logits z. Here they are divided by the request's own temperature t,
which comes in its parameters' `extra_args`: log softmax(z / t) in float32, as for the tokens that vLLM samples. vLLM
has two model runners; the second, which it prefers on GPUs, is not yet run: it needs Triton. The module imports no
vLLM.
"""

from collections.abc import Callable
from typing import Any

import torch

KEY = "grpo_score_temperature"
"""In `extra_args` of a request's sampling parameters."""


def temperature_in(params: Any) -> float:
    """Returns at which a request with these parameters (None: a pooling request's) is scored."""
    return float((getattr(params, "extra_args", None) or {}).get(KEY, 1.0))


def install(runner: Any) -> None:
    """Lets a model runner of vLLM score each request at its own temperature. Raises TypeError where it is neither of
    the two that are known."""
    if hasattr(runner, "_get_prompt_logprobs_dict") and hasattr(getattr(runner, "sampler", None), "compute_logprobs"):
        _one_by_one(runner)
    elif hasattr(getattr(runner, "prompt_logprobs_worker", None), "compute_prompt_logprobs"):
        _all_together(runner.prompt_logprobs_worker)
    else:
        raise TypeError(f"its model runner is an unknown {type(runner).__name__}; use vLLM 0.26 to 0.33")


def _one_by_one(runner: Any) -> None:
    """The first runner is called once for each temperature of a step, and sees the requests of that one."""
    compute, sampler = runner._get_prompt_logprobs_dict, runner.sampler

    def by_temperature(*args: Any, **kwargs: Any) -> dict[str, Any]:
        waiting: dict[str, int] = runner.num_prompt_logprobs
        groups: dict[float, dict[str, int]] = {}
        for name, num in waiting.items():
            groups.setdefault(temperature_in(runner.requests[name].sampling_params), {})[name] = num
        if groups.keys() <= {1.0}:
            return dict(compute(*args, **kwargs))
        computed: dict[str, Any] = {}
        own = sampler.compute_logprobs
        try:
            for temperature, some in groups.items():
                runner.num_prompt_logprobs = left = dict(some)
                sampler.compute_logprobs = lambda logits, t=temperature: own(logits.float() / t)
                computed |= compute(*args, **kwargs)
                for name in some.keys() - left.keys():  # it takes out those that are through
                    del waiting[name]
        finally:
            del sampler.compute_logprobs
            runner.num_prompt_logprobs = waiting
        return computed

    runner._get_prompt_logprobs_dict = by_temperature


def _all_together(worker: Any) -> None:
    """The second runner computes the logits of all tokens of a step in pieces, in their order."""
    add, compute = worker.add_request, worker.compute_prompt_logprobs
    temperatures: dict[int, float] = {}
    """One temperature for each of the runner's places for requests; each new request sets that of its place."""

    def add_request(name: str, place: int, params: Any) -> None:
        temperatures[place] = temperature_in(params)
        add(name, place, params)

    def compute_prompt_logprobs(
        logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, batch: Any, *args: Any
    ) -> dict[str, Any]:
        of_requests = [temperatures.get(int(place), 1.0) for place in batch.idx_mapping_np]
        if all(temperature == 1.0 for temperature in of_requests):
            return dict(compute(logits_of, hidden, batch, *args))
        starts = torch.as_tensor(batch.query_start_loc_np)[: len(of_requests) + 1]
        of_rows = torch.tensor(of_requests).repeat_interleave(starts.diff())[:, None].to(hidden.device)
        num_done = 0

        def divided(part: torch.Tensor) -> torch.Tensor:
            nonlocal num_done
            num_done += len(part)
            return logits_of(part).float() / of_rows[num_done - len(part) : num_done]

        computed = dict(compute(divided, hidden, batch, *args))
        if num_done not in (0, len(of_rows)):
            raise RuntimeError(f"vLLM scored {num_done} of a step's {len(of_rows)} tokens, expected all or none")
        return computed

    worker.add_request, worker.compute_prompt_logprobs = add_request, compute_prompt_logprobs
