"""Noise on the norm weights of policy versions, token by token: vLLM's worker of a server that was started for it.

A version with noise is an adapter of its own: row s + 1 of a norm's `bank` holds the noisy weights of the adapter in
slot s, and `rows` says for each token which row it takes, 0 for the clean weights. Both are overwritten in place, so
that captured CUDA graphs and compiled code read the new values. vLLM takes our norm by its own hook for
implementations. Not yet run on a GPU.

Shapes: `T` tokens of the engine's step, `H` the hidden size, `L` adapter slots.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from grpo.infer.worker import PolicyWorker
from grpo.transport.weights.store import NOISE_FILE
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head's queries and keys, which have no noise."""
_ALIGNMENT = 8
"""vLLM pads the tokens of a step to a multiple of it."""


def with_noise(
    clean: torch.Tensor, x: torch.Tensor, *, rows: torch.Tensor, bank: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Returns the norm's output [T, H]: where a token's row is 0 it is `clean`, bit for bit, else
    `w * x / sqrt(mean(x²) + ε)` with the row's weights. Computed in float32 and rounded once, as in the trainer,
    because small noise would be lost in 16 bits. `rows` [at least T]."""
    row, wide = rows[: x.shape[0]], x.float()
    noisy = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * bank[row]).to(x.dtype)
    return torch.where((row > 0).unsqueeze(-1), noisy, clean)


class NoiseTable:
    """The adapters that have noise, and the tokens of the coming step that belong to them."""

    def __init__(self, rows: torch.Tensor, banks: Mapping[str, torch.Tensor]) -> None:
        """`rows` [the most tokens of a step] i64, zeros; `banks` [1 + L, H] float32 by the names of the norms' weights
        in the checkpoint; their row 0 is never read."""
        self.rows, self.banks = rows, banks
        self._noise: dict[int, Mapping[str, torch.Tensor]] = {}
        self._in_slot: dict[int, int] = {}
        """Slot to the adapter whose noise is in the banks."""

    def hold(self, adapter_id: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Remembers an adapter's noisy weights, [H] each, of all norms."""
        self.drop(adapter_id)
        self._noise[adapter_id] = {name: weight.to(self.rows.device) for name, weight in weights.items()}

    def drop(self, adapter_id: int) -> None:
        """Forgets an adapter's noise; without effect where it has none."""
        self._noise.pop(adapter_id, None)
        self._in_slot = {slot: held for slot, held in self._in_slot.items() if held != adapter_id}

    def update(self, index_mapping: Iterable[int], lora_index_to_id: Sequence[int | None]) -> None:
        """Prepares the coming step: the adapter id of each token (0: none), and the adapter id in each slot."""
        row_of_id = {}
        for slot, adapter_id in enumerate(lora_index_to_id):
            if adapter_id is not None and adapter_id in self._noise:
                row_of_id[adapter_id] = slot + 1
                if self._in_slot.get(slot) != adapter_id:
                    for name, weight in self._noise[adapter_id].items():
                        self.banks[name][slot + 1].copy_(weight)
                    self._in_slot[slot] = adapter_id
        rows = torch.tensor([row_of_id.get(adapter_id, 0) for adapter_id in index_mapping], dtype=torch.int64)
        self.rows[: len(rows)].copy_(rows)


def _follow_mapping(table: NoiseTable, wrapper: Any) -> None:
    """Lets the table know each batch's mapping of adapters before vLLM's punica wrapper does."""
    update = wrapper.update_metadata

    def update_metadata(mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any) -> None:
        table.update(mapping.index_mapping, lora_index_to_id)
        update(mapping, lora_index_to_id, *args, **kwargs)

    wrapper.update_metadata = update_metadata


@cache
def _shared_rows(num_tokens: int, device: torch.device) -> torch.Tensor:
    """[num_tokens] i64 zeros, the same tensor for all norms of this process."""
    return torch.zeros(num_tokens, dtype=torch.int64, device=device)


@RMSNorm.register_oot(name=RMSNorm.__name__)
class NoisyRMSNorm(RMSNorm):  # type: ignore[misc]
    """vLLM's RMSNorm; one of the hidden state can give each token its own weights."""

    bank: torch.Tensor
    rows: torch.Tensor

    def __init__(self, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(hidden_size, *args, **kwargs)
        config = get_current_vllm_config()
        self.can_be_noisy = self.has_weight and hidden_size == config.model_config.get_hidden_size()
        if self.can_be_noisy:
            device = self.weight.device
            num_tokens = -(-config.scheduler_config.max_num_batched_tokens // _ALIGNMENT) * _ALIGNMENT
            bank = torch.zeros(1 + config.lora_config.max_loras, hidden_size, dtype=torch.float32, device=device)
            self.register_buffer("bank", bank, persistent=False)
            self.register_buffer("rows", _shared_rows(num_tokens, device), persistent=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Does what vLLM's does, for x and residual [T, H]."""
        output = super().forward(x, residual)
        if not self.can_be_noisy or x.dim() != 2:
            return output  # type: ignore[no-any-return]
        clean, normalised = (output, x) if residual is None else output
        noisy = with_noise(clean, normalised, rows=self.rows, bank=self.bank, epsilon=self.variance_epsilon)
        return noisy if residual is None else (noisy, normalised)


# By this name vLLM's settings switch its implementations on and off, and ours goes with its own.
NoisyRMSNorm.name = RMSNorm.name


class NoisyPolicyWorker(PolicyWorker):
    """Our extension of vLLM's worker class, of a server that was started for noise."""

    def install_norm_noise(self, model: Any, norms: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of the norms that can carry noise, by the checkpoint's names of their weights, of which
        `norms` are candidates. Raises TypeError where there is none, or one that the checkpoint does not name."""
        served = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, NoisyRMSNorm) and module.can_be_noisy and name.rpartition(".")[2] not in HEAD_NORMS
        }
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        own = {name: [name] if mapper is None else mapper.apply_list([name]) for name in norms}
        found = {name: served.pop(names[0]) for name, names in own.items() if names and names[0] in served}
        if served or not found:
            named = f"{len(found)} norms that can carry noise, and others that the checkpoint names otherwise"
            raise TypeError(f"norm_noise: {type(model).__name__} has {named}: {sorted(served)}; set norm_noise: false")
        rows = next(iter(found.values())).rows
        self.noise_table = NoiseTable(rows, {name: norm.bank for name, norm in found.items()})
        for wrapper in set(model.lora_manager.punica_wrapper_mapping.values()):
            _follow_mapping(self.noise_table, wrapper)
        return {name: norm.hidden_size for name, norm in found.items()}

    def load_norm_noise(self, adapter_id: int, folder: str) -> None:
        """Lets an adapter have the noise in a version's folder, from its next request on."""
        self.noise_table.hold(adapter_id, load_file(Path(folder) / NOISE_FILE))

    def drop_norm_noise(self, adapter_id: int) -> None:
        """Forgets the noise of an adapter, whose requests have ended."""
        self.noise_table.drop(adapter_id)
