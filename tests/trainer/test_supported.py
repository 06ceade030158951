"""Every model type of the allow-list computes what transformers computes, sample by sample; the others are refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.packing import packed_tokens
from grpo.trainer.supported import PACKED, UNPACKED, is_packed
from grpo.transport.records import MicroBatch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models import CPU, SIZES, tiny_batch, tiny_policy, with_shared_prompt
from tests.trainer.test_attention import one_by_one
from tools.models_table import table

LENGTHS = (7, 2, 19, 9, 33, 2)
KINDS: dict[str, dict[str, Any]] = {
    "phi3": {"targets": ("qkv_proj", "o_proj")},
    **{
        kind: {"sliding_window": 128} for kind in ("cwm", "exaone4", "gemma3_text", "gemma4_text", "ministral", "olmo3")
    },
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 48,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {
        "targets": ("q_proj", "w1", "out_proj"),
        "layer_types": ["conv", "full_attention"],
        "block_dim": 32,
        "block_ff_dim": 48,
    },
    "qwen3_5_text": {
        "targets": ("q_proj", "in_proj_qkv", "down_proj"),
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(SIZES | changes))


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(kind, **changes)).save_pretrained(folder)
    return folder


def batch_with_a_shared_prompt() -> MicroBatch:
    return with_shared_prompt(tiny_batch(LENGTHS), 2, 4)


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_logprobs_and_gradients_are_those_of_transformers_sample_by_sample(tmp_path: Path, kind: str) -> None:
    sizes = dict(KINDS.get(kind, {}))
    policy = tiny_policy(saved(tmp_path, kind, **sizes), target_modules=sizes.pop("targets", ("q_proj",)))
    batch = batch_with_a_shared_prompt()
    ours = policy.logprobs(packed_tokens(batch, CPU))
    gradients = torch.autograd.grad(ours.sum(), policy.parameters)
    model = policy.causal_lm
    model.set_attn_implementation("eager")
    alone = one_by_one(model, batch)
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    for one, other in zip(gradients, torch.autograd.grad(alone.sum(), policy.parameters), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_recurrent_models_are_computed_in_rows_and_several_adapters_reach_their_own_tokens(
    tmp_path: Path, kind: str
) -> None:
    sizes = dict(KINDS[kind])
    folder, targets = saved(tmp_path, kind, **sizes), sizes.pop("targets")
    policy = tiny_policy(folder, target_modules=targets, lora_adapters=("left", "right"))
    batch = replace(batch_with_a_shared_prompt(), adapters=np.array([0, 1, 0, 1, 1, 0], np.int32))
    only_left = replace(batch, adapters=np.zeros(6, np.int32))
    with torch.no_grad():
        both, left = (policy.logprobs(packed_tokens(b, CPU)) for b in (batch, only_left))
    of_left = torch.from_numpy(np.repeat(batch.adapters == 0, batch.sequence_lengths)[batch.loss_mask])
    torch.testing.assert_close(both[of_left], left[of_left], atol=1e-5, rtol=0)
    assert (both[~of_left] - left[~of_left]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (config_of("qwen3_moe", num_experts=4), "qwen3_moe"),
        (config_of("gemma2"), "gemma2"),
        (config_of("gpt_oss", num_local_experts=1), "gpt_oss"),
        (config_of("glm", logits_scaling=2.0), "logits_scaling"),
        (AutoConfig.for_model("qwen3_5"), "more than text"),
        (config_of("mistral", sliding_window=127), "sequence_len"),
        (config_of("mistral", sliding_window=128), None),
        (config_of("qwen2", sliding_window=16, use_sliding_window=False), None),
    ],
)
def test_other_models_are_refused_by_name_and_windows_that_hold_no_whole_sample(config: Any, named: str | None) -> None:
    with nullcontext() if named is None else pytest.raises(ModelError, match=named):
        assert is_packed(config, 128)


def test_the_kernels_refuse_what_they_do_not_compute(tmp_path: Path) -> None:
    policy = tiny_policy(saved(tmp_path, "qwen3"))
    for layer in policy.causal_lm.base_model.layers:
        layer.self_attn.sliding_window = 16
    with pytest.raises(ModelError, match="16"):
        policy.logprobs(packed_tokens(tiny_batch((17,)), CPU))


def test_the_page_has_every_model_type() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "models.md").read_text()
