"""The witness in the gradient: what the trainer adds to its passes so that the gradients tell which samples, and which
tokens and advantages, are in them (docs/proofs.md)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import StepCounts, counts_of
from grpo.trainer.distributed import Ranks, full_tensor
from grpo.trainer.packing import PackedTokens, to_device
from grpo.transport.receipts import NOT_FINITE, WITNESS_SIZE, Witness
from grpo.transport.records import MicroBatch
from grpo.transport.witness import signs, token_values


class GradientWitness(torch.nn.Module):
    """A parameter of zeros that is never stepped. Its gradient is accumulated and reduced as those of the model, of
    which it is a part, and so says what is in theirs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.zeros = torch.nn.Parameter(torch.zeros(2, WITNESS_SIZE, device=device))

    def forward(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns 0, whose gradient to the parameter is `sums` [2, 64]."""
        return (self.zeros * sums).sum()


class Shares(NamedTuple):
    """The shares that an optimizer step has in its batch's witness: weights of tokens are those of the optimizer step,
    times these."""

    policy: float = 1.0
    hints: float = 1.0
    pairs: float = 1.0


WHOLE = Shares()
"""The batch is one optimizer step."""


class Witnessing:
    """The sums that the passes add to the witness's gradient, those of passes without a backward with the next one
    that has one. Sums are of float64, and nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.shares = WHOLE
        self._none = torch.zeros(2, WITNESS_SIZE, dtype=torch.float64, device=device)
        self._sums = self._none

    @torch.no_grad()
    def add(
        self,
        packed: PackedTokens,
        sample_ids: torch.Tensor,
        of_samples: torch.Tensor,
        weights: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Adds the targets of a pass: `sample_ids` [K] i64 are rows of the signs `of_samples` [S, 64] f64, `weights`
        [K] f64 each token's weight in the loss, `values` [K] f64 that times its advantage."""
        before = packed.before_targets
        ids, places = packed.token_ids.index_select(0, before), packed.position_ids.index_select(0, before)
        adapters = 0 if packed.adapters is None else packed.adapters.index_select(0, before)
        tokens = torch.stack([weights, values * token_values(packed.targets, ids, places, adapters)])
        sums = tokens.new_zeros(2, len(of_samples)).index_add_(1, sample_ids, tokens)
        self._sums = self._sums + sums @ of_samples

    def add_silent(self, batch: MicroBatch, counts: StepCounts, settings: LossSettings) -> None:
        """Adds samples that teach nothing and are not computed: their weights, without content, because all their
        advantages are 0."""
        num_tokens = np.add.reduceat(batch.loss_mask.astype(np.float64), batch.starts)
        weights = num_tokens / counts.loss_tokens
        if settings.normaliser != "token":
            per_sample = settings.constant_tokens if settings.normaliser == "constant" else num_tokens
            weights = num_tokens / (counts.samples * per_sample)
        sums = self.shares.policy * weights @ signs(batch.rollout_ids)
        self._sums = self._sums + to_device(np.stack([sums, np.zeros_like(sums)]), self._none.device)

    def take(self) -> torch.Tensor:
        """Returns [2, 64] f32 what was added since the last call."""
        taken, self._sums = self._sums, self._none
        return taken.float()


def shares_of(
    parts: Sequence[Sequence[MicroBatch]], settings: LossSettings, ranks: Ranks, *, epochs: int
) -> list[Shares]:
    """Returns the shares of a batch's optimizer steps, of which this rank has these micro-batches, each of them made in
    `epochs` epochs. They are counted anew, so that a wrong normaliser of the loss is seen. Collective."""
    if len(parts) == epochs == 1:
        return [WHOLE]
    numbers = ranks.all_reduce_sum([number for part in parts for number in counts_of(part)])
    width = len(StepCounts._fields)
    counts = [StepCounts(*numbers[start : start + width]) for start in range(0, len(numbers), width)]
    whole = [epochs * max(1, sum(column)) for column in zip(*counts, strict=True)]
    shares = [StepCounts(*(number / total for number, total in zip(one, whole, strict=True))) for one in counts]
    by_tokens = settings.normaliser == "token"
    return [Shares(one.loss_tokens if by_tokens else one.samples, one.hint_tokens, one.pairs) for one in shares]


def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns [2, 64] f64 presence and content (`Witness`) as the witness's gradient has them. Collective."""
    return full_tensor(gradient).to("cpu", torch.float64)


def witness_of(sums: torch.Tensor) -> Witness:
    """Returns [2, 64] sums as a record, with the nine digits that tell float32 numbers apart."""
    whole = torch.nan_to_num(sums, nan=NOT_FINITE, posinf=NOT_FINITE, neginf=-NOT_FINITE)
    presence, content = (tuple(float(f"{value:.9g}") for value in row) for row in whole.tolist())
    return Witness(presence=presence, content=content)
