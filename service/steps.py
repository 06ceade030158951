"""What a model's step tells of itself: the witness that its gradient must bear (docs/proofs.md), and its figures.

Legend: `N` datums, `K` targets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
MAX_KEPT = 1_000_000
"""Tokens of a step of which a trace is kept, 20 bytes each until the step."""


class Ratios(NamedTuple):
    """Sums over the tokens of a request that were sampled, of their log-ratio now to then, and of its exponential."""

    num: int = 0
    log_ratio: float = 0.0
    kl: float = 0.0
    """Of Schulman's k3."""
    ratio: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A request whose gradient waits for the next step."""

    loss_fn: str
    loss: float
    num_datums: int
    num_packed: int
    """Tokens of the passes."""
    num_tokens: int
    """Targets that are more than context."""
    ratios: Ratios
    seconds: float
    """Of the passes."""
    data: Sequence[Datum]
    """For the trace; none of them beyond `MAX_KEPT` tokens."""
    logprobs: Sequence[Float32]
    """Of their targets as they were computed."""


def computed(
    request: ForwardBackward, logprobs: Sequence[Float32], *, loss: float, seconds: float, before: Sequence[Computed]
) -> Computed:
    """Returns a request with the log-probabilities of each datum; `before` are those since the last step."""
    data, num_packed = request.data, sum(len(one) + 1 for one in logprobs)
    keeps = num_packed + sum(one.num_packed for one in before) <= MAX_KEPT
    return Computed(
        loss_fn=request.loss_fn,
        loss=loss,
        num_datums=len(data),
        num_packed=num_packed,
        num_tokens=sum(int(is_taught(datum).sum()) for datum in data),
        ratios=_ratios(data, logprobs),
        seconds=seconds,
        data=data if keeps else (),
        logprobs=logprobs if keeps else (),
    )


def _ratios(data: Sequence[Datum], logprobs: Sequence[Float32]) -> Ratios:
    """Returns how far the tokens' log-probabilities are from those that they were sampled with."""
    parts = [
        (now - datum.inputs["logprobs"])[is_taught(datum)].astype(np.float64)
        for datum, now in zip(data, logprobs, strict=True)
        if "logprobs" in datum.inputs
    ]
    if not parts or not (log_ratio := np.concatenate(parts)).size:
        return Ratios()
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return Ratios(
        num=len(ratio),
        log_ratio=float(log_ratio.sum()),
        kl=float((ratio - 1 - log_ratio).sum()),
        ratio=float(ratio.sum()),
        smallest=float(ratio.min()),
        largest=float(ratio.max()),
    )


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
        """Number of targets that are more than context."""
        return sum(part.num_tokens for part in self.parts)

    def metrics(self) -> dict[str, float]:
        """Returns the step's line in `metrics.jsonl`, with the names of docs/metrics.md; ratios where a loss has
        log-probabilities to compare with."""
        found: dict[str, float] = {}
        for part in self.parts:
            found[f"loss/{part.loss_fn}"] = found.get(f"loss/{part.loss_fn}", 0.0) + part.loss
        of = [part.ratios for part in self.parts]
        if num := sum(one.num for one in of):
            found |= {
                "policy/log_ratio_mean": sum(one.log_ratio for one in of) / num,
                "policy/kl": sum(one.kl for one in of) / num,
                "policy/ratio_mean": sum(one.ratio for one in of) / num,
                "policy/ratio_min": min(one.smallest for one in of),
                "policy/ratio_max": max(one.largest for one in of),
            }
        seconds = self.seconds + sum(part.seconds for part in self.parts)
        num_packed = sum(part.num_packed for part in self.parts)
        return {
            **found,
            "policy/tokens": float(self.num_tokens),
            "rollout/num": float(sum(part.num_datums for part in self.parts)),
            "optim/grad_norm": self.grad_norm,
            "optim/learning_rate": self.learning_rate,
            "perf/train_tokens": float(num_packed),
            "perf/train_tokens_per_s": num_packed / seconds,
            "time/train_s": seconds,
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
    device, lengths = packed.targets.device, np.array([len(datum.targets) for datum in batch])
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
        lengths = np.array([len(datum.targets) for datum in data])
        starts = np.cumsum(lengths) - lengths
        ids = np.concatenate([np.repeat(one.token_ids, one.candidates) for one in data])
        targets = np.concatenate([one.targets for one in data])
        places = np.concatenate([np.repeat(np.arange(len(one.token_ids)), one.candidates) for one in data])
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
