"""The ranks of tokens, which vLLM returns with log-probabilities, on a CPU.

vLLM has torch compile the function that counts them, even where it compiles no model. That takes two seconds of a
server's first request, and a C++ compiler. Written as here it needs neither, and takes up to twice as long as compiled:
on an AMD EPYC, one thread, 64 rows and a vocabulary of 151,936, 2.1 ms instead of 1.4, beside 20 of the log-softmax.

The module imports no vLLM at its start.
"""

import importlib
from typing import Any

import torch

PART = 2**18
"""Numbers that are compared at a time: with their results they fit into a processor's cache."""


def num_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """x [R, V], values [R, 1] → [R] i64 how many numbers of a row are as large as its value or larger.

    Counted in float32, which is exact up to 2^24.
    """
    rows = max(1, PART // x.shape[1])
    counts = [
        torch.ge(part, value, out=torch.empty(part.shape, dtype=torch.float32)).sum(-1)
        for part, value in zip(x.split(rows), values.split(rows), strict=True)
    ]
    return torch.cat(counts).long()


def install() -> bool:
    """Let vLLM count so, in this process; whether this vLLM counts where it is known to."""
    sampler: Any = importlib.import_module("vllm.v1.sample.sampler")
    known = hasattr(sampler, "batched_count_greater_than")
    if known:
        sampler.batched_count_greater_than = num_at_least
    return known
