"""Every model type of the allow-list computes what transformers computes, sample by sample; the others are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.model import Policy
from grpo.trainer.packing import packed_tokens
from grpo.trainer.supported import PACKED, UNPACKED, is_packed
from grpo.transport.records import MicroBatch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models import CPU, tiny_batch, tiny_policy
from tests.trainer.test_attention import one_by_one
from tools.models_table import table

LENGTHS = (7, 2, 19, 9, 33, 2)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
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


def policy_of(folder: Path, targets: tuple[str, ...] = ("q_proj",), **options: Any) -> Policy:
    """With an adapter whose B is random, as after some training."""
    return tiny_policy(folder, target_modules=targets, **options)


def batch_with_a_shared_prompt() -> MicroBatch:
    """The third and the fifth sample begin with the same 6 tokens, without loss."""
    batch = tiny_batch(LENGTHS, temperatures=np.ones(sum(LENGTHS), np.float32))
    ids, mask = batch.token_ids.copy(), batch.loss_mask.copy()
    for sample in (2, 4):
        start = int(batch.starts[sample])
        ids[start : start + 6] = [3, 7, 4, 7, 5, 9]
        mask[start : start + 6] = False
    return replace(batch, token_ids=ids, loss_mask=mask)


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_logprobs_and_gradients_are_those_of_transformers_sample_by_sample(tmp_path: Path, kind: str) -> None:
    sizes = dict(KINDS.get(kind, {}))
    policy = policy_of(saved(tmp_path, kind, **sizes), sizes.pop("targets", ("q_proj",)))
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
    policy = policy_of(folder, targets, lora_adapters=("left", "right"))
    batch = replace(batch_with_a_shared_prompt(), adapters=np.array([0, 1, 0, 1, 1, 0], np.int32))
    only_left = replace(batch, adapters=np.zeros(6, np.int32))
    with torch.no_grad():
        both, left = (policy.logprobs(packed_tokens(b, CPU)) for b in (batch, only_left))
    of_left = torch.from_numpy(np.repeat(batch.adapters == 0, batch.sequence_lengths)[batch.loss_mask])
    torch.testing.assert_close(both[of_left], left[of_left], atol=1e-5, rtol=0)
    assert (both[~of_left] - left[~of_left]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3_moe", {"num_experts": 4}, "qwen3_moe"),
        ("gemma2", {}, "gemma2"),
        ("gpt_oss", {"num_local_experts": 1}, "gpt_oss"),
        ("glm", {"logits_scaling": 2.0}, "logits_scaling"),
    ],
)
def test_other_models_are_refused_by_name(kind: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        is_packed(config_of(kind, **changes), 128)


def test_a_model_of_more_than_text_is_refused() -> None:
    with pytest.raises(ModelError):
        is_packed(AutoConfig.for_model("qwen3_5"), 128)


def test_a_window_must_hold_a_whole_sample() -> None:
    config = config_of("mistral", sliding_window=16)
    assert is_packed(config, 16)
    with pytest.raises(ModelError, match="sequence_len"):
        is_packed(config, 17)
    unused = config_of("qwen2", sliding_window=16, use_sliding_window=False)
    assert is_packed(unused, 128)


def test_the_kernels_refuse_what_they_do_not_compute(tmp_path: Path) -> None:
    policy = policy_of(saved(tmp_path, "qwen3"))
    for layer in policy.causal_lm.base_model.layers:
        layer.self_attn.sliding_window = 16
    with pytest.raises(ModelError, match="16"):
        policy.logprobs(packed_tokens(tiny_batch((17,)), CPU))


def test_the_page_has_every_model_type() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "models.md").read_text()
