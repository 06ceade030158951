"""Every model type of the allow-list computes what transformers computes, sample by sample; the others are refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.trainer.distributed import full_tensor
from grpo.trainer.errors import ModelError
from grpo.trainer.loading import CheckpointTensors, filled_model
from grpo.trainer.packing import packed_tokens
from grpo.trainer.supported import PACKED, UNPACKED, is_packed
from grpo.transport.records import MicroBatch
from msgspec.structs import replace
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.bench import UNMASKED, Bench
from tests.trainer.models import CPU, tiny_batch, tiny_policy, with_shared_prompt, write_files
from tests.trainer.test_attention import one_by_one
from tools.models_table import lists
from tools.random_models import make_small, small_config

LENGTHS = (7, 2, 19, 9, 33, 2)
FUSED = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
OTHERS = {
    "apertus": FUSED - {"gate_proj"},
    "arcee": FUSED - {"gate_proj"},
    "bamba": FUSED | {"in_proj", "out_proj"},
    "falcon_h1": FUSED | {"in_proj"},
    "gemma4_text": FUSED | {"per_layer_input_gate", "per_layer_projection"},
    "glm": FUSED - {"gate_proj", "up_proj"} | {"gate_up_proj"},
    "glm4": FUSED - {"gate_proj", "up_proj"},
    "granitemoehybrid": {
        *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj", "input_linear", "output_linear")
    },
    "lfm2": {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"},
    "olmo_hybrid": FUSED | {"a_proj", "b_proj", "g_proj"},
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "qwen3_5_text": FUSED | {"out_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"},
    "starcoder2": {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"},
}

RENAMED = {"olmo_hybrid"}
NOT_WHOLE = RENAMED | {"apertus", "gemma4_text"}


def batch_with_a_shared_prompt() -> MicroBatch:
    return with_shared_prompt(tiny_batch(LENGTHS), 2, 4)


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_logprobs_and_gradients_are_those_of_transformers_sample_by_sample(tmp_path: Path, kind: str) -> None:
    policy = tiny_policy(make_small(tmp_path, kind))
    assert set(policy.weights.target_modules) == OTHERS.get(kind, FUSED)
    batch = batch_with_a_shared_prompt()
    ours = policy.logprobs(packed_tokens(batch, CPU))
    gradients = torch.autograd.grad(ours.sum(), policy.parameters)
    model = policy.causal_lm
    model.set_attn_implementation("eager")
    alone = one_by_one(model, batch)
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)
    for one, other in zip(gradients, torch.autograd.grad(alone.sum(), policy.parameters), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_a_step_with_the_default_targets_is_published_and_loaded_again_by_peft(tmp_path: Path, kind: str) -> None:
    model = make_small(tmp_path / "model", kind)
    bench = Bench(model, tmp_path, max_steps=1, loss=UNMASKED)
    batch = batch_with_a_shared_prompt()
    bench.train(batch)
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_files(bench.files(1), folder)
    assert set(json.loads((folder / "adapter_config.json").read_text())["target_modules"]) == OTHERS.get(kind, FUSED)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        before, served = one_by_one(base, batch), one_by_one(PeftModel.from_pretrained(base, folder), batch)
        ours = bench.policy.logprobs(packed_tokens(batch, CPU))
    torch.testing.assert_close(ours, served, atol=1e-5, rtol=0)
    assert (served - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_a_model_that_is_filled_tensor_by_tensor_is_that_of_transformers(tmp_path: Path, kind: str) -> None:
    """Bases that are quantized or shared are filled so."""
    folder = make_small(tmp_path, kind)
    tensors = CheckpointTensors(folder, device=CPU, dtype=torch.bfloat16)
    if kind in RENAMED:
        with pytest.raises(ModelError, match="tensor"):
            filled_model(tensors, attention="eager")
        return
    ours, theirs = (
        filled_model(tensors, attention="eager"),
        AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"),
    )
    mine, expected = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (ours, theirs))
    assert mine.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(mine[name], tensor, atol=0, rtol=0)


@pytest.mark.parametrize("kind", sorted(PACKED | UNPACKED))
def test_all_weights_are_trained_where_each_tensor_of_the_checkpoint_is_a_parameter(tmp_path: Path, kind: str) -> None:
    """In bfloat16 they are sharded, and filled by rows."""
    options: dict[str, Any] = {"lora": False, "weight_broadcast": {"format": "full"}, "moved": False, "recipe": "bf16"}
    folder = make_small(tmp_path, kind)
    with pytest.raises(ModelError, match="lora: false") if kind in NOT_WHOLE else nullcontext():
        ours = tiny_policy(folder, **options).causal_lm
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        mine, expected = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (ours, theirs))
        assert mine.keys() == expected.keys()
        assert all(torch.equal(full_tensor(mine[name]), full_tensor(tensor)) for name, tensor in expected.items())


def test_a_layer_on_which_peft_has_no_adapter_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="out_proj"):
        tiny_policy(make_small(tmp_path, "falcon_h1"), lora_target_modules=("out_proj",))


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_5_text"])
def test_recurrent_models_are_computed_in_rows_and_several_adapters_reach_their_own_tokens(
    tmp_path: Path, kind: str
) -> None:
    policy = tiny_policy(make_small(tmp_path, kind), lora_adapters=("left", "right"))
    batch = replace(batch_with_a_shared_prompt(), adapters=np.array([0, 1, 0, 1, 1, 0], np.int32))
    only_left = replace(batch, adapters=np.zeros(6, np.int32))
    with torch.no_grad():
        both, left = (policy.logprobs(packed_tokens(b, CPU)) for b in (batch, only_left))
    of_left = torch.from_numpy(np.repeat(batch.adapters == 0, batch.sequence_lengths)[batch.loss_mask])
    torch.testing.assert_close(both[of_left], left[of_left], atol=1e-5, rtol=0)
    assert (both[~of_left] - left[~of_left]).abs().max() > 1e-3


def long_rope(short: int) -> Any:
    """A configuration with other position factors above `short` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    return small_config(
        "phi3",
        rope_parameters=rope | {"original_max_position_embeddings": short},
        original_max_position_embeddings=short,
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (small_config("qwen3_moe", num_experts=4), "qwen3_moe"),
        (small_config("gemma2"), "gemma2"),
        (small_config("gpt_oss", num_local_experts=1), "gpt_oss"),
        (small_config("glm", logits_scaling=2.0), "logits_scaling"),
        (AutoConfig.for_model("qwen3_5"), "more than text"),
        (small_config("mistral", sliding_window=127), "sequence_len"),
        (small_config("mistral", sliding_window=128), None),
        (small_config("qwen2", sliding_window=16, use_sliding_window=False), None),
        (long_rope(127), "max_model_len"),
        (long_rope(128), None),
    ],
)
def test_other_models_are_refused_by_name_and_windows_that_hold_no_whole_sample(config: Any, named: str | None) -> None:
    with nullcontext() if named is None else pytest.raises(ModelError, match=named):
        assert is_packed(config, 128)


def test_the_kernels_refuse_what_they_do_not_compute(tmp_path: Path) -> None:
    policy = tiny_policy(make_small(tmp_path, "qwen3"))
    for layer in policy.causal_lm.base_model.layers:
        layer.self_attn.sliding_window = 16
    with pytest.raises(ModelError, match="16"):
        policy.logprobs(packed_tokens(tiny_batch((17,)), CPU))


def test_the_page_has_every_model_type() -> None:
    assert lists() in (Path(__file__).parents[2] / "docs" / "models.md").read_text()
