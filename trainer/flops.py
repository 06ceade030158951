"""Counts the arithmetic of a step, for the share of a GPU's peak speed that training reaches (MFU)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from grpo.configs.loss import LossSettings
from grpo.trainer.batch import by_signal
from grpo.trainer.loading import decoder_linears
from grpo.trainer.model import Policy
from grpo.transport.records import MicroBatch

PEAK_TFLOPS = {"H200": 989, "H100": 989, "B200": 2250, "A100": 312, "L40S": 362, "RTX 4090": 165}
"""Operations a second of dense products in bfloat16, by a part of the GPU's name, from NVIDIA's data sheets (SXM
modules)."""


def step_flops(policy: Policy, batches: Sequence[MicroBatch], settings: LossSettings) -> float:
    """Returns the floating-point operations that these micro-batches' policy loss needs, forward and backward, each
    sample on its own and nothing computed again.

    With N weights of the decoder's linear layers, adapters aside, V words, H the hidden size, A the width of all heads
    of all layers, a sample of L tokens of which K carry loss: 2 N L forward, as much backward for the activations, and
    once more for weights that are trained; 6 A L² of causal attention; 4 V H K of the head, or 6. Of samples that
    teach nothing `silent_share` is computed, forward only: 2 N L + 2 A L² + 2 V H K.
    """
    teaching, silent, *_ = by_signal(batches, settings)
    return _flops(policy, teaching, each=4 if policy.trains_adapters else 6, attention=6) + _flops(
        policy, silent, each=2, attention=2
    )


def _flops(policy: Policy, batches: Sequence[MicroBatch], *, each: int, attention: int) -> float:
    if not batches:
        return 0.0
    config = policy.causal_lm.config.get_text_config()
    names = [name for name in decoder_linears(policy.causal_lm) if ".lora_" not in name]
    modules = [policy.causal_lm.get_submodule(name) for name in names]
    num_weights = sum(module.in_features * module.out_features for module in modules)
    lengths = np.concatenate([batch.sequence_lengths for batch in batches]).astype(float)
    num_loss_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    scores = sum(num_heads * size for num_heads, _, size in attention_heads(config)) * float((lengths**2).sum())
    head = each * config.vocab_size * config.hidden_size * num_loss_tokens
    return float(each * num_weights * lengths.sum() + attention * scores + head)


def attention_heads(config: Any) -> list[tuple[int, int, int]]:
    """Returns the number of query heads, of key-value heads, and the size of a head in each layer of a language model
    with this configuration."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    return [
        (
            layer.num_attention_heads,
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        )
        for layer in layers
    ]


def peak_flops(device: torch.device) -> float | None:
    """Returns the operations a second that the device can do in bfloat16; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
