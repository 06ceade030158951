"""Which base models are refused, because packed samples would come out otherwise than on a server."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainer.models import CPU, save_tiny_model, tiny_policy
from trainer.batch import PackedTokens
from trainer.errors import ModelError
from trainer.model import Policy, load_policy
from trainer.supported import check_config, check_samples_kept_apart, named

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
}


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(SIZES | changes))


def load(folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Policy:
    """A random model of that type, as a policy. Of `changes` those that `load_policy` knows are for it."""
    torch.manual_seed(0)
    known = set(changes) & set(inspect.signature(load_policy).parameters)
    chosen = {key: changes.pop(key) for key in known}
    AutoModelForCausalLM.from_config(config_of(kind, **changes)).save_pretrained(folder)
    options: dict[str, Any] = {"rank": 4, "alpha": 8, "target_modules": ("q_proj",), "sequence_len": 128, "seed": 0}
    return load_policy(folder, name="tiny", device=CPU, dtype=dtype, **(options | chosen))


def try_out(hidden_of: Any, *, num_layers: int = 0) -> None:
    check_samples_kept_apart(
        hidden_of, model_type="toy", num_layers=num_layers, vocab_size=64, sequence_len=128, device=CPU
    )


def embedded(tokens: PackedTokens) -> torch.Tensor:
    table = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return table[tokens.token_ids]


def test_a_model_of_single_tokens_keeps_samples_apart() -> None:
    try_out(lambda tokens: embedded(tokens)[tokens.before_targets])


def test_a_recurrence_over_all_that_is_packed_does_not() -> None:
    with pytest.raises(ModelError, match=r"toy does not keep apart .* change by \d+% with what is packed before it"):
        try_out(lambda tokens: embedded(tokens).cumsum(0)[tokens.before_targets])


def test_a_convolution_over_two_tokens_reaches_from_one_answer_into_the_next() -> None:
    def convolved(tokens: PackedTokens) -> torch.Tensor:
        hidden = embedded(tokens)
        return (hidden + 0.5 * hidden.roll(1, 0))[tokens.before_targets]

    with pytest.raises(ModelError, match="toy does not keep apart"):
        try_out(convolved)


def test_a_recurrence_that_begins_anew_with_position_0_misses_the_prompt_in_common() -> None:
    def from_position_0(tokens: PackedTokens) -> torch.Tensor:
        starts = torch.where(tokens.position_ids == 0, torch.arange(len(tokens.position_ids)), 0).cummax(0).values
        sums = embedded(tokens).cumsum(0)
        return (sums - sums[starts])[tokens.before_targets]

    with pytest.raises(ModelError, match="toy does not keep apart"):
        try_out(from_position_0)


def test_hidden_states_that_are_no_numbers_do_not_pass() -> None:
    with pytest.raises(ModelError, match="hidden states of this toy are not finite"):
        try_out(lambda tokens: embedded(tokens)[tokens.before_targets] * torch.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_state_that_no_config_names_are_found_by_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("trainer.base.check_config", lambda *_: None)
    layers = {"layer_types": ["conv", "full_attention"], "block_dim": 32, "block_ff_dim": 48, "conv_L_cache": 3}
    with pytest.raises(ModelError, match="lfm2 does not keep apart"):
        load(tmp_path, "lfm2", dtype=dtype, **layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_of_experts_keeps_samples_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    load(tmp_path, "qwen3_moe", dtype=dtype, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("lfm2", ["conv", "full_attention"]),
        ("qwen3_5_text", ["linear_attention", "full_attention"]),
        ("llama4_text", ["chunked_attention", "full_attention"]),
    ],
)
def test_layers_that_are_no_full_attention_are_refused_by_their_names(kind: str, layers: list[str]) -> None:
    with pytest.raises(ModelError, match=rf"{kind} has layers of the types \['(?!full)\w+'\], and the trainer"):
        check_config(config_of(kind, layer_types=layers), 128)


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "phi3", "starcoder2"])
def test_a_window_without_layer_types_holds_for_every_layer(kind: str) -> None:
    config = config_of(kind, sliding_window=16, pad_token_id=0)
    with pytest.raises(ModelError, match=rf"{kind} .* window of 16 tokens.*sequence_len \(now 17\) to at most 16"):
        check_config(config, 17)
    check_config(config, 16)


def test_a_window_that_is_not_used_is_none() -> None:
    for kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        check_config(config_of(kind, sliding_window=16, use_sliding_window=False), 128)
    check_config(config_of("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=2), 128)
    with pytest.raises(ModelError, match="window of 16"):
        check_config(config_of("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1), 128)


def test_a_window_that_a_layer_uses_is_found_though_the_config_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.base.check_config", lambda *_: None)
    with pytest.raises(ModelError, match=r"MistralAttention attends within .* of 127 tokens.*sequence_len \(now 128\)"):
        load(tmp_path / "below", "mistral", sliding_window=127)
    load(tmp_path / "enough", "mistral", sliding_window=128)


def test_capped_scores_sinks_and_masks_are_refused_by_the_layer_that_has_them(tmp_path: Path) -> None:
    full = {"layer_types": ["full_attention"] * 2}
    with pytest.raises(ModelError, match="Gemma2Attention caps its attention scores at 5, which the trainer does not"):
        load(tmp_path / "capped", "gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=None, **full)
    with pytest.raises(ModelError, match="GptOssAttention has attention sinks, which the trainer does not compute"):
        load(tmp_path / "sinks", "gpt_oss", num_local_experts=4, num_experts_per_tok=2, **full)
    with pytest.raises(ModelError, match="DogeAttention has a mask of its own, which the trainer does not compute"):
        load(tmp_path / "mask", "doge")


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "qwen3_5"])
def test_a_model_of_more_than_text_is_refused_before_its_weights_are_read(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    options: dict[str, Any] = {"rank": 4, "alpha": 8, "target_modules": ("q_proj",), "sequence_len": 128, "seed": 0}
    with pytest.raises(ModelError, match=rf"{kind} is a model of more than text, .* {kind}_text, .* use a text checkp"):
        load_policy(tmp_path, name="tiny", device=CPU, dtype=torch.float32, **options)


def test_a_model_that_hands_its_attention_no_layout_is_refused_by_its_type(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"models of type stablelm cannot be trained, .*TypeError: .* 'layout'\)$"):
        load(tmp_path, "stablelm")


@pytest.mark.parametrize(
    ("kind", "sizes", "module"),
    [
        ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, "q_proj"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "query_key_value"),
    ],
)
def test_a_model_with_an_attention_of_its_own_is_refused_though_small_weights_hide_it(
    tmp_path: Path, kind: str, sizes: dict[str, Any], module: str
) -> None:
    with pytest.raises(ModelError, match=rf"2 layers of this {kind} call the trainer's attention 0 times, and only"):
        load(tmp_path, kind, target_modules=(module,), init_std=0.02, initializer_range=0.02, **sizes)


def test_state_that_small_weights_hide_is_found_by_the_layers_that_attend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.base.check_config", lambda *_: None)
    layers = {"layer_types": ["conv", "full_attention"], "block_dim": 32, "block_ff_dim": 48, "conv_L_cache": 3}
    with pytest.raises(ModelError, match="the 2 layers of this lfm2 call the trainer's attention 1 times"):
        load(tmp_path, "lfm2", initializer_range=0.02, **layers)


def test_every_layer_has_to_call_the_trainers_attention() -> None:
    def attends(tokens: PackedTokens) -> torch.Tensor:
        assert tokens.layout.attended is not None
        tokens.layout.attended.append("Attention")
        return embedded(tokens)[tokens.before_targets]

    try_out(attends, num_layers=1)
    with pytest.raises(ModelError, match="the 2 layers of this toy call the trainer's attention 1 times"):
        try_out(attends, num_layers=2)


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize(
    ("kind", "layers"),
    [("gptj", {"rotary_dim": 4}), ("gpt_neo", {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4})],
)
def test_a_model_that_knows_no_attention_but_its_own_is_refused_by_its_type(
    tmp_path: Path, kind: str, layers: dict[str, Any], quantization: Any
) -> None:
    with pytest.raises(ModelError, match=rf"models of type {kind} cannot be trained, .*\(KeyError: 'grpo_buckets'\)$"):
        load(tmp_path, kind, quantization=quantization, **layers)


def test_only_errors_that_a_models_build_explains_are_taken_for_that() -> None:
    with pytest.raises(ModelError, match=r"type toy cannot .* \(AttributeError: no layers\)"), named("toy"):
        raise AttributeError("no\nlayers")
    own = ModelError("as it is")
    with pytest.raises(ModelError, match=r"^as it is$"), named("toy"):
        raise own
    with pytest.raises(RuntimeError, match=r"^out of memory$"), named("toy"):
        raise RuntimeError("out of memory")


def test_the_trial_leaves_the_random_generators_and_gradients_as_they_are(tmp_path: Path) -> None:
    folder, before = save_tiny_model(tmp_path), torch.random.get_rng_state()
    policy = tiny_policy(folder, moved=False)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in policy.parameters)
