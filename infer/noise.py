"""Noise on the norm weights of policy versions, token by token: vLLM's worker of a server that was started for it.

A version with noise is an adapter of its own, and its noise belongs to the slot that the adapter has now: row s + 1 of
a norm's `bank` holds the noisy weights of slot s, and `rows` says for each token which row it takes, 0 for the clean
weights. Both are overwritten in place when the batch's mapping changes, so that captured CUDA graphs and compiled code
read the new values.

vLLM imports this module before it builds the model, because the extension is named to it, and takes our norm by its
own hook for implementations. Not yet run on a GPU, where the norm is compiled with the model and always computes both
outputs; on a CPU steps without noise cost one look at a flag.

Shapes: `T` tokens of the engine's step, `H` the hidden size, `L` adapter slots.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from infer.worker import PolicyWorker
from transport.weights.store import NOISE_FILE

HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head's queries and keys, which have no noise."""
_ALIGNMENT = 8
"""vLLM pads the tokens of a step to a multiple of it."""


def with_noise(
    clean: torch.Tensor, x: torch.Tensor, *, rows: torch.Tensor, bank: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Returns the norm's output [T, H]: where a token's row is 0 it is `clean`, bit for bit, else
    `w * x / sqrt(mean(x²) + ε)` with the row's weights.

    `clean` and `x` [T, H] are the output of the norm with its own weights and what was normalised; `rows` [at least T].
    Computed in float32 and rounded once, as in the trainer. In 16 bits a weight of 1 + 0.001 is 1, and so is a rounded
    number times 1.001 that number: rounded on the way, noise of the later stages would come to nothing.
    """
    row, wide = rows[: x.shape[0]], x.float()
    noisy = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * bank[row]).to(x.dtype)
    return torch.where((row > 0).unsqueeze(-1), noisy, clean)


class NoiseTable:
    """Which adapters have noise, and which tokens of the coming step belong to them."""

    def __init__(self, rows: torch.Tensor, banks: Mapping[str, torch.Tensor]) -> None:
        """`rows` [the most tokens of a step] i64, zeros; `banks` [1 + L, H] float32 by the names of the norms' weights
        in the checkpoint; their row 0 is never read."""
        self.rows, self.banks = rows, banks
        self.active = False
        """Whether any token of the coming step has noise."""
        self._noise: dict[int, Mapping[str, torch.Tensor]] = {}
        self._in_slot: dict[int, int] = {}
        """Slot to the adapter whose noise is in the banks."""

    def hold(self, adapter_id: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Remembers an adapter's noisy weights, [H] each. Raises ValueError unless they are for exactly these norms."""
        if odd := sorted(set(weights) ^ set(self.banks)):
            raise ValueError(
                f"noise for {len(weights)} norms, the model has {len(self.banks)}; they differ in {odd[0]}"
            )
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
        rows = [row_of_id.get(adapter_id, 0) for adapter_id in index_mapping] if row_of_id else []
        if any(rows):
            self.rows[: len(rows)].copy_(torch.tensor(rows))
        elif self.active:
            self.rows.zero_()
        self.active = any(rows)


class _NoiseRows:
    """Stands where vLLM's LoRA manager expects a punica wrapper: tells the table, then the wrapper itself."""

    def __init__(self, wrapper: Any, table: NoiseTable) -> None:
        self._wrapper, self._table = wrapper, table

    def update_metadata(self, mapping: Any, lora_index_to_id: Sequence[int | None], *args: Any, **kwargs: Any) -> None:
        """Called before each step whose mapping differs from that of the last."""
        self._table.update(mapping.index_mapping, lora_index_to_id)
        self._wrapper.update_metadata(mapping, lora_index_to_id, *args, **kwargs)


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
        self.table: NoiseTable | None = None
        self.can_be_noisy = self.has_weight and hidden_size == config.model_config.get_hidden_size()
        if self.can_be_noisy:
            self.always = not config.model_config.enforce_eager
            device = self.weight.device
            num_tokens = -(-config.scheduler_config.max_num_batched_tokens // _ALIGNMENT) * _ALIGNMENT
            bank = torch.zeros(1 + config.lora_config.max_loras, hidden_size, dtype=torch.float32, device=device)
            self.register_buffer("bank", bank, persistent=False)
            self.register_buffer("rows", _shared_rows(num_tokens, device), persistent=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's, for x and residual [T, H]."""
        output = super().forward(x, residual)
        if not self.can_be_noisy or x.dim() != 2 or not (self.always or (self.table and self.table.active)):
            return output  # type: ignore[no-any-return]
        clean, normalised = (output, x) if residual is None else output
        noisy = with_noise(clean, normalised, rows=self.rows, bank=self.bank, epsilon=self.variance_epsilon)
        return noisy if residual is None else (noisy, normalised)


# By this name vLLM's settings switch its implementations on and off, and ours goes with its own.
NoisyRMSNorm.name = RMSNorm.name


class NoisyPolicyWorker(PolicyWorker):
    """Our extension of vLLM's worker class, of a server that was started for noise."""

    def install_norm_noise(self, model: Any, norms: Sequence[str]) -> dict[str, int]:
        """Finds the norms that can carry noise. Returns their sizes by the names of their weights in the checkpoint, of
        which `norms` are candidates.

        Raises TypeError where the served model has none, or one that the checkpoint does not name.
        """
        served = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, NoisyRMSNorm) and module.can_be_noisy and name.rpartition(".")[2] not in HEAD_NORMS
        }
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        own = {name: [name] if mapper is None else mapper.apply_list([name]) for name in norms}
        found = {name: served.pop(names[0]) for name, names in own.items() if names and names[0] in served}
        if served or not found:
            raise TypeError(
                f"norm_noise: {type(model).__name__} has {len(found)} norms that can carry noise, and without a name "
                f"in the checkpoint {sorted(served) or 'none'}; start this server with norm_noise: false"
            )
        rows = next(iter(found.values())).rows
        self.noise_table = NoiseTable(rows, {name: norm.bank for name, norm in found.items()})
        for norm in found.values():
            norm.table = self.noise_table
        wrappers = model.lora_manager.punica_wrapper_mapping
        for prefix, wrapper in wrappers.items():
            wrappers[prefix] = _NoiseRows(wrapper, self.noise_table)
        return {name: norm.hidden_size for name, norm in found.items()}

    def load_norm_noise(self, adapter_id: int, folder: str) -> None:
        """Lets an adapter have the noise in a version's folder, from its next request on."""
        self.noise_table.hold(adapter_id, load_file(Path(folder) / NOISE_FILE))

    def drop_norm_noise(self, adapter_id: int) -> None:
        """Forgets the noise of an adapter, whose requests have ended."""
        self.noise_table.drop(adapter_id)
