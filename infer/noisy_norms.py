"""Norm weights of a policy version with noise, row by row of a batch that mixes it with others.

Runs in the engine process. A version with noise is an adapter of its own, and its noise belongs to the slot that the
adapter has now: row s + 1 of a norm's `bank` holds the noisy weights of slot s, and `rows` says for each token which
row it takes, 0 for the clean weights. Both are overwritten in place when the batch's mapping changes, as vLLM's own
mapping is, so that captured CUDA graphs and compiled code read the new values.

Shapes: `T` tokens of the engine's step, `H` the hidden size, `L` adapter slots.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch


class Bank(Protocol):
    """One norm."""

    bank: torch.Tensor
    """[1 + L, H] float32; row 0 is never read."""


def noisy_rms_norm(x: torch.Tensor, weights: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`w * x / sqrt(mean(x²) + ε)` [T, H] in the type of x, for x [T, H] and weights [T, H] float32.

    Computed in float32 and rounded once, as in the trainer. In 16 bits a weight of 1 + 0.001 is 1, and so is a rounded
    number times 1.001 that number: rounded on the way, as clean norms are, noise of the later stages would come to
    nothing.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weights).to(x.dtype)


def with_noise(
    clean: torch.Tensor, x: torch.Tensor, *, rows: torch.Tensor, bank: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """[T, H] the norm's output: where a token's row is 0 it is `clean`, bit for bit, else with the row's weights.

    `clean` and `x` [T, H] are the output of the norm with its own weights and what was normalised; `rows` [at least T].
    """
    row = rows[: x.shape[0]]
    noisy = noisy_rms_norm(x, bank[row], epsilon)
    return torch.where((row > 0).unsqueeze(-1), noisy, clean)


class NoiseTable:
    """Which adapters have noise, and which tokens of the coming step belong to them."""

    def __init__(self, rows: torch.Tensor, norms: Mapping[str, Bank]) -> None:
        """`rows` [the most tokens of a step] i64, zeros; `norms` by the names of their weights in the checkpoint."""
        self.rows, self.norms = rows, norms
        self.active = False
        """Whether any token of the coming step has noise."""
        self._noise: dict[int, Mapping[str, torch.Tensor]] = {}
        self._in_slot: dict[int, int] = {}
        """Slot to the adapter whose noise is in the banks."""

    def hold(self, adapter_id: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Remember an adapter's noisy weights, [H] each. Raises ValueError unless they are for exactly these norms."""
        if set(weights) != set(self.norms):
            odd = sorted(set(weights) ^ set(self.norms))
            raise ValueError(
                f"noise for {len(weights)} norms, the model has {len(self.norms)}; they differ in {odd[0]}"
            )
        self._noise[adapter_id] = {name: weight.to(self.rows.device) for name, weight in weights.items()}
        self._forget(adapter_id)

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter's noise; without effect where it has none."""
        self._noise.pop(adapter_id, None)
        self._forget(adapter_id)

    def _forget(self, adapter_id: int) -> None:
        self._in_slot = {slot: held for slot, held in self._in_slot.items() if held != adapter_id}

    def update(self, index_mapping: Iterable[int], lora_index_to_id: Sequence[int | None]) -> None:
        """Prepare the coming step: the adapter id of each token (0: none), and the adapter id in each slot."""
        row_of_id = {}
        for slot, adapter_id in enumerate(lora_index_to_id):
            if adapter_id is not None and adapter_id in self._noise:
                row_of_id[adapter_id] = slot + 1
                self._fill(slot, adapter_id)
        rows = [row_of_id.get(adapter_id, 0) for adapter_id in index_mapping] if row_of_id else []
        if any(rows):
            self.rows[: len(rows)].copy_(torch.tensor(rows))
            self.active = True
        elif self.active:
            self.rows.zero_()
            self.active = False

    def _fill(self, slot: int, adapter_id: int) -> None:
        if self._in_slot.get(slot) != adapter_id:
            for name, weight in self._noise[adapter_id].items():
                self.norms[name].bank[slot + 1].copy_(weight)
            self._in_slot[slot] = adapter_id


class NoiseRows:
    """Stands where vLLM's LoRA manager expects a punica wrapper: tells the table, then the wrapper itself."""

    def __init__(self, wrapper: Any, table: NoiseTable) -> None:
        self._wrapper, self._table = wrapper, table

    def update_metadata(self, mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any) -> None:
        """Before each step whose mapping differs from that of the last."""
        self._table.update(mapping.index_mapping, lora_index_to_id)
        self._wrapper.update_metadata(mapping, lora_index_to_id, *args, **kwargs)
