"""vLLM's worker with noise on the norm weights: its RMSNorm is replaced by ours, and our extension gains its noise.

vLLM imports this module in the engine process before it builds the model, because the extension is named to it; the
registration is vLLM's own hook for another implementation of an operation. It must come so early: whatever would be
put around a norm later, compiled code and captured CUDA graphs would not run.

Not yet run: needs a GPU. On a GPU the norm is compiled with the model and always computes both outputs; what is tested
of that on a CPU is that compiled code reads `rows` and `bank` anew. With adapters vLLM runs uncompiled on a CPU, and
steps without noise cost one look at a flag.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from infer.noisy_norms import NoiseRows, NoiseTable, with_noise
from infer.worker import PolicyWorker
from transport.weights.store import NOISE_FILE

HEAD_NORMS = ("q_norm", "k_norm")
"""Norms of each head's queries and keys, which have no noise."""
_ALIGNMENT = 8
"""vLLM pads the tokens of a step to a multiple of it."""


@cache
def shared_rows(num_tokens: int, device: torch.device) -> torch.Tensor:
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
            self.register_buffer("rows", shared_rows(num_tokens, device), persistent=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As vLLM's, for x and residual [T, H]."""
        output = super().forward(x, residual)
        if not self.can_be_noisy or x.dim() != 2 or not (self.always or (self.table and self.table.active)):
            return output  # type: ignore[no-any-return]
        if residual is None:
            return self._with_noise(output, x)
        clean, normalised = output
        return self._with_noise(clean, normalised), normalised

    def _with_noise(self, clean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return with_noise(clean, x, rows=self.rows, bank=self.bank, epsilon=self.variance_epsilon)


# By this name vLLM's settings switch its implementations on and off, and ours goes with its own.
NoisyRMSNorm.name = RMSNorm.name


class NoisyPolicyWorker(PolicyWorker):
    """Our extension of vLLM's worker class, of a server that was started for noise."""

    def install_norm_noise(self, checkpoint_names: Sequence[str]) -> dict[str, int]:
        """Find the norms that can carry noise; their sizes by the names of their weights in the checkpoint, of which
        `checkpoint_names` are candidates.

        Raises TypeError where the served model has none, or one that the checkpoint does not name.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        found = noisy_norms(model)
        norms = {name: found.pop(own) for name, own in served_names(model, checkpoint_names) if own in found}
        if found or not norms:
            raise TypeError(
                f"norm_noise: {type(model).__name__} has {len(norms)} norms that can carry noise, and without a name "
                f"in the checkpoint {sorted(found) or 'none'}; start this server with norm_noise: false"
            )
        rows = next(iter(norms.values())).rows
        self.noise_table = NoiseTable(rows, norms)
        for norm in norms.values():
            norm.table = self.noise_table
        wrappers = model.lora_manager.punica_wrapper_mapping
        for prefix, wrapper in wrappers.items():
            wrappers[prefix] = NoiseRows(wrapper, self.noise_table)
        return {name: norm.hidden_size for name, norm in norms.items()}

    def load_norm_noise(self, adapter_id: int, folder: str) -> None:
        """Let an adapter have the noise in a version's folder, from its next request on."""
        self.noise_table.hold(adapter_id, load_file(Path(folder) / NOISE_FILE))

    def drop_norm_noise(self, adapter_id: int) -> None:
        """Forget the noise of an adapter, whose requests have ended."""
        self.noise_table.drop(adapter_id)


def noisy_norms(model: torch.nn.Module) -> dict[str, NoisyRMSNorm]:
    """The model's norms that can carry noise, by the names of their weights in vLLM."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, NoisyRMSNorm) and module.can_be_noisy and name.rpartition(".")[2] not in HEAD_NORMS
    }


def served_names(model: Any, checkpoint_names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of a weight's name in the checkpoint and in vLLM; those that vLLM leaves out are missing."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    pairs = []
    for name in checkpoint_names:
        for own in [name] if mapper is None else mapper.apply_list([name]):
            pairs.append((name, own))
    return pairs
