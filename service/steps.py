"""What a model's step tells of itself: the witness that its gradient must bear (docs/proofs.md), and its figures.

Legend: `N` datums, `K` targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from grpo.service.errors import Refused
from grpo.service.wire import Datum, ForwardBackward
from grpo.trainer.loss import MAX_LOG_RATIO
from grpo.trainer.packing import PackedTokens, to_device
from grpo.trainer.witness import Witnessing, witness_of
from grpo.transport.receipts import ExpectedWitness, Witness
from grpo.transport.records import Float32
from grpo.transport.witness import TOLERANCE, signs, token_values
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A request whose gradient waits for the next step."""

    request: ForwardBackward
    logprobs: Sequence[Float32]
    """Of each datum, of its targets as they were computed."""
    loss: float
    seconds: float
    """Of the passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was applied."""

    parts: Sequence[Computed]
    expected: ExpectedWitness
    witness: Witness
    grad_norm: float
    learning_rate: float
    seconds: float
    """Of the optimizer."""

    @property
    def num_tokens(self) -> int:
        """Number of targets."""
        return sum(len(one) for part in self.parts for one in part.logprobs)

    def metrics(self) -> dict[str, float]:
        """Returns the step's line in `metrics.jsonl`, with the names of docs/metrics.md."""
        losses: dict[str, float] = {}
        for part in self.parts:
            losses[f"loss/{part.request.loss_fn}"] = losses.get(f"loss/{part.request.loss_fn}", 0.0) + part.loss
        seconds = self.seconds + sum(part.seconds for part in self.parts)
        return {
            **losses,
            **_ratios(self.parts),
            "policy/tokens": float(self.num_tokens),
            "rollout/num": float(sum(len(part.logprobs) for part in self.parts)),
            "optim/grad_norm": self.grad_norm,
            "optim/learning_rate": self.learning_rate,
            "perf/train_tokens": float(self.num_tokens),
            "perf/train_tokens_per_s": self.num_tokens / seconds,
            "time/train_s": seconds,
        }


def _ratios(parts: Sequence[Computed]) -> dict[str, float]:
    """Returns how far the tokens' log-probabilities are from those that they were sampled with; nothing where no loss
    has these. Tokens with neither an advantage nor a log-probability were not sampled."""
    found = []
    for part in parts:
        for datum, logprobs in zip(part.request.data, part.logprobs, strict=True):
            if "logprobs" in datum.inputs:
                found.append((logprobs - datum.inputs["logprobs"])[is_taught(datum)].astype(np.float64))
    if not found or not (log_ratio := np.concatenate(found)).size:
        return {}
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return {
        "policy/log_ratio_mean": float(log_ratio.mean()),
        "policy/kl": float((ratio - 1 - log_ratio).mean()),
        "policy/ratio_mean": float(ratio.mean()),
        "policy/ratio_min": float(ratio.min()),
        "policy/ratio_max": float(ratio.max()),
    }


def values_of(inputs: Mapping[str, Any]) -> Any:
    """Returns the loss's array of how much each token is to be learned: weights or advantages [K]."""
    return inputs["weights"] if "weights" in inputs else inputs["advantages"]


def is_taught(datum: Datum) -> NDArray[np.bool_]:
    """Returns which of a datum's targets are more than context: those with a weight, or an advantage, or a
    log-probability that they were sampled with."""
    taught: NDArray[np.bool_] = values_of(datum.inputs) != 0
    return taught | (datum.inputs["logprobs"] != 0) if "logprobs" in datum.inputs else taught


# --- the witness ---


def witness_sums(batch: Sequence[Datum], packed: PackedTokens, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns [2, 64] what a pass over these datums adds to the witness's gradient, by the pass's own tensors."""
    device, lengths = packed.targets.device, np.array([len(datum.token_ids) for datum in batch])
    values = values_of(inputs).double()
    witnessing = Witnessing(device)
    witnessing.add(
        packed,
        to_device(np.repeat(np.arange(len(batch)), lengths), device),
        to_device(signs([datum.id for datum in batch]), device),
        torch.ones_like(values),
        values,
    )
    return witnessing.take()


@dataclass(slots=True)
class Expected:
    """The witness that the gradient must bear, from the datums as they came."""

    ids: list[str] = field(default_factory=list)
    """[N]"""
    sums: list[Numbers] = field(default_factory=list)
    """Parts of [N, 2], presence and content of each datum."""
    content_size: float = 0.0

    def add(self, data: Sequence[Datum]) -> None:
        """Adds the datums of a request."""
        lengths = np.array([len(datum.token_ids) for datum in data])
        starts = np.cumsum(lengths) - lengths
        ids, targets = (np.concatenate([getattr(one, name) for one in data]) for name in ("token_ids", "targets"))
        places = np.arange(len(ids)) - np.repeat(starts, lengths)
        values = np.concatenate([values_of(datum.inputs) for datum in data]).astype(np.float64)
        content = values * token_values(targets.astype(np.int64), ids.astype(np.int64), places)
        self.ids += [datum.id for datum in data]
        self.sums.append(np.stack([lengths.astype(np.float64), np.add.reduceat(content, starts)], axis=1))
        self.content_size += float(np.abs(values).sum())

    def witness(self) -> ExpectedWitness:
        """Returns the sums."""
        sums = np.concatenate(self.sums)
        presence, content = (tuple(row.tolist()) for row in sums.T @ signs(self.ids))
        sizes: Any = {"presence_size": float(sums[:, 0].sum()), "content_size": self.content_size}
        return ExpectedWitness(presence=presence, content=content, **sizes)

    def checked(self, found: torch.Tensor) -> tuple[ExpectedWitness, Witness]:
        """Returns both, where what the gradient has, [2, 64], is what was expected. Raises `Refused` otherwise."""
        expected, witness = self.witness(), witness_of(found)
        both = np.array([expected.presence, expected.content])
        limits = TOLERANCE * np.array([expected.presence_size, expected.content_size])
        gaps = np.array([witness.presence, witness.content]) - both
        if (np.abs(gaps) <= limits[:, None]).all():
            return expected, witness
        raise Refused(
            f"the gradient is not the sum over just the {len(self.ids)} datums since the last step: "
            f"{self._explained(gaps, limits)}. It was dropped, and the weights are as before; this is a fault of the "
            "service or its machine, none of yours"
        )

    def _explained(self, gaps: Numbers, limits: Numbers) -> str:
        """Returns the one datum whose presence in the gradient differs, or how far all differ."""
        lengths, own = np.concatenate(self.sums)[:, 0], signs(self.ids)
        atoms = lengths[:, None] * own
        factors = atoms @ gaps[0] / (atoms**2).sum(axis=1)
        rests = np.abs(gaps[0] - factors[:, None] * atoms).max(axis=1)
        best = int(rests.argmin())
        if rests[best] <= limits[0] and abs(factors[best]) > TOLERANCE:
            return f"datum {self.ids[best]} (seq_id/number) counts {1 + factors[best]:.4g} times"
        largest = np.abs(gaps).max(axis=1) / np.maximum(limits / TOLERANCE, 1e-30)
        return f"its witness differs by {largest[0]:.3g} (presence) and {largest[1]:.3g} (content) of its size"
