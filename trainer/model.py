"""The base model with its adapter: loading, log-probabilities of packed tokens, the policy's weights as files.

Knows nothing of losses, steps or transports.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from trainer import attention
from trainer.batch import PackedTokens
from trainer.errors import ModelError
from trainer.logprobs import token_logprobs
from trainer.lora import FusedLoraLinear
from transport.weights.base import ADAPTER_CONFIG_FILE, ADAPTER_FILE, Weight

log = logging.getLogger(__name__)

Snapshot = Mapping[str, torch.Tensor]
"""The adapter's weights by PEFT's names, float32 in main memory: a copy that the next step leaves alone."""
_PEFT_PREFIX = "base_model.model."
_SAFETENSORS_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}

_SCALED_LOGITS_KEYS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Policy:
    """A frozen base and the adapter that is trained, which starts as zero."""

    def __init__(self, model: PeftModel, *, name: str) -> None:
        self._model, self._name = model, name
        self._causal_lm: Any = model.get_base_model()
        weight: torch.Tensor = self._causal_lm.get_output_embeddings().weight
        self.head = weight
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size = int(model.config.vocab_size)
        self.special_ids = _special_ids(model.config)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # The parameters' own memory: they are updated in place.
        self._adapter: Snapshot = get_peft_model_state_dict(model, save_embedding_layers=False)

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    def logprobs(self, tokens: PackedTokens) -> torch.Tensor:
        """[K] float32 log-probabilities of the targets at their temperatures, with gradient to the adapter."""
        output = self._causal_lm.base_model(
            input_ids=tokens.token_ids[None],
            position_ids=tokens.position_ids[None],
            use_cache=False,
            layout=tokens.layout,
        )
        before = output.last_hidden_state[0].index_select(0, tokens.before_targets)
        return token_logprobs(before, self.head, tokens.targets, tokens.temperatures)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within it, log-probabilities are those of the base."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context

    def adapter_is_zero(self) -> bool:
        """Whether the adapter changes nothing, because every B is zero."""
        return not any(bool(tensor.any()) for name, tensor in self._adapter.items() if "lora_B" in name)

    def snapshot(self) -> Snapshot:
        """The adapter as it is now."""
        return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in self._adapter.items()}

    def adapter_files(self, snapshot: Snapshot | None = None) -> dict[str, bytes]:
        """The adapter in PEFT's format, float32: name → bytes. Without a snapshot, as it is now."""
        tensors = {n: t.contiguous() for n, t in (self.snapshot() if snapshot is None else snapshot).items()}
        config = self._model.peft_config["default"].to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": self._name}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        config_json = json.dumps(plain, indent=1, sort_keys=True).encode()
        return {ADAPTER_FILE: save(tensors, metadata={"format": "pt"}), ADAPTER_CONFIG_FILE: config_json}

    def merged_weights(self, snapshot: Snapshot) -> list[Weight]:
        """The base's matrices that the adapter changes, with it merged into them, in the base's type.

        Each is computed when it is read. They may be read beside a training step: the base does not change.
        """
        layers = {n: m for n, m in self._causal_lm.named_modules() if isinstance(m, FusedLoraLinear)}
        return [_merged(name, layer, snapshot) for name, layer in layers.items()]


def _merged(name: str, layer: FusedLoraLinear, snapshot: Snapshot) -> Weight:
    """W + s B A, summed in float32."""
    base: torch.Tensor = layer.get_base_layer().weight
    a, b = (snapshot[f"{_PEFT_PREFIX}{name}.lora_{part}.weight"] for part in "AB")

    def tensor() -> torch.Tensor:
        factors = b.to(base.device), a.to(base.device)
        return torch.addmm(base.detach().float(), *factors, alpha=layer.scaling["default"]).to(base.dtype)

    return Weight(
        name=f"{name}.weight",
        dtype=_SAFETENSORS_TYPES[base.dtype],
        shape=tuple(base.shape),
        read=lambda: tensor().cpu().view(torch.uint8).numpy().data,
        tensor=tensor,
    )


def load_policy(
    folder: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    rank: int,
    alpha: int,
    target_modules: tuple[str, ...],
    sequence_len: int,
) -> Policy:
    """The base model in `folder` with a new adapter: A random from `seed`, B zero, both float32.

    `name` is what adapter_config.json calls the base. Raises `ModelError` where the model cannot be trained so.
    """
    attention.register()
    disable_progress_bar()
    implementation = attention.implementation_for(device, dtype)
    base = _load_base(folder, dtype, implementation)
    _check_base(base, target_modules, sequence_len)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({torch.nn.Linear: FusedLoraLinear})
    # On the CPU whatever the device, so that a seed means the same adapter everywhere.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, config)
    policy = Policy(model.to(device).eval(), name=name)
    counts = sum(p.numel() for p in policy.parameters), sum(p.numel() for p in model.parameters())
    log.info("adapter with %d of %d parameters, %s, %s on %s", *counts, implementation, policy.dtype_name, device)
    return policy


def _load_base(folder: Path, dtype: torch.dtype, implementation: str) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=implementation, local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"the base model in {folder} cannot be loaded: {error}") from error


def _check_base(base: Any, target_modules: tuple[str, ...], sequence_len: int) -> None:
    """Refuses what the packed forward pass would silently compute otherwise than the server."""
    config = base.config
    linear = {name.rsplit(".", 1)[-1] for name, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
    if missing := sorted(set(target_modules) - linear):
        raise ModelError(
            f"lora_target_modules {missing} are no linear layers of this {config.model_type}; it has {sorted(linear)}"
        )
    if scaled := [key for key in _SCALED_LOGITS_KEYS if getattr(config, key, None) not in (None, 1, 1.0)]:
        raise ModelError(f"{config.model_type} changes its logits by {scaled}, which the trainer does not compute")
    if getattr(base.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"the LM head of this {config.model_type} has a bias, which the trainer does not compute")
    window = getattr(config, "sliding_window", None)
    if window is not None and "sliding_attention" in getattr(config, "layer_types", ()) and window < sequence_len:
        raise ModelError(
            f"{config.model_type} attends within a sliding window of {window} tokens, which the trainer does not "
            f"compute; set sequence_len (now {sequence_len}) to at most {window}"
        )


def _special_ids(config: Any) -> frozenset[int]:
    ids: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
