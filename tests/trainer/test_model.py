import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer.errors import ModelError
from grpo.trainer.lora import FusedLoraLinear
from grpo.trainer.model import load_policy
from grpo.trainer.packing import packed_tokens

from tests.trainer.models import (
    CPU,
    files_of,
    is_zero,
    save_tiny_model,
    tiny_batch,
    tiny_policy,
    tiny_settings,
)


def test_a_new_adapter_changes_nothing_and_its_a_comes_from_the_seed(tiny_model: Path) -> None:
    one, same, other = (tiny_policy(tiny_model, seed=seed, moved=False) for seed in (1, 1, 2))
    tokens = packed_tokens(tiny_batch((8,)), CPU)
    with torch.no_grad(), one.weights.disabled():
        base = one.logprobs(tokens)
    with torch.no_grad():
        torch.testing.assert_close(one.logprobs(tokens), base, atol=5e-6, rtol=0)
    assert is_zero(one)
    assert not is_zero(tiny_policy(tiny_model))
    assert files_of(one) == files_of(same)
    assert files_of(one) != files_of(other)


def test_the_adapter_is_float32_on_a_bfloat16_base_and_gets_gradients(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model, recipe="bf16")
    assert policy.dtype_name == "bfloat16"
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    policy.logprobs(packed_tokens(tiny_batch((8, 5)), CPU)).sum().backward()
    for parameter in policy.parameters:
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.abs().sum() > 0


def test_the_fused_layer_equals_pefts_own_forward_and_gradients(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    layer = policy.causal_lm.model.layers[0].mlp.up_proj
    assert isinstance(layer, FusedLoraLinear)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    inputs = (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    ours, theirs = layer(x), super(FusedLoraLinear, layer).forward(x)
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(4))
    pairs = zip(torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(theirs, inputs, weights), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def load_tiny(folder: Path, **changes: Any) -> None:
    load_policy(tiny_settings(folder, **changes), folder, CPU)


def test_a_target_that_is_no_linear_layer_is_refused_by_name(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="query_key_value"):
        load_tiny(tiny_model, lora_target_modules=("q_proj", "query_key_value"))


def test_a_sliding_window_below_the_sequence_length_is_refused(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    folder = save_tiny_model(tmp_path, **window)
    with pytest.raises(ModelError, match="sequence_len"):
        load_tiny(folder)
    load_tiny(folder, sequence_len=16)


def test_a_snapshot_stays_what_it_was_when_training_goes_on(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    snapshot, files = policy.weights.snapshot(), files_of(policy)
    weights = [weight.tensor().clone() for weight in policy.weights.merged(snapshot)]
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(1.0)
    assert policy.weights.files(snapshot) == files != files_of(policy)
    assert all(map(torch.equal, (weight.tensor() for weight in policy.weights.merged(snapshot)), weights))


def test_an_fp32_head_is_computed_in_float32_on_bfloat16_hidden_states(tiny_model: Path) -> None:
    tokens = packed_tokens(tiny_batch((9, 12)), CPU)
    rounded, wide = (tiny_policy(tiny_model, recipe="bf16", fp32_lm_head=on) for on in (False, True))
    with torch.no_grad():
        hidden = rounded.hidden(tokens).float()
        logits = hidden @ rounded.head.float().T / tokens.temperatures[:, None]
        expected = logits.log_softmax(-1).gather(1, tokens.targets[:, None])[:, 0]
        torch.testing.assert_close(wide.logprobs(tokens), expected, atol=1e-5, rtol=0)
        assert (rounded.logprobs(tokens) - expected).abs().max() > 1e-3


def test_a_config_of_layers_that_nobody_knows_is_an_error_that_names_the_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_model / "config.json").read_bytes()) | {"layer_types": ["newest", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="layer_types"):
        load_tiny(tmp_path)


CODE = """
from pathlib import Path
from transformers import PretrainedConfig
Path({marker!r}).touch()
class Own(PretrainedConfig):
    model_type = "own"
"""


def test_code_that_comes_with_a_model_never_runs_and_nobody_is_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(str(words)) or "y")
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    config = json.loads((tmp_path / "config.json").read_bytes()) | own
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_tiny(tmp_path)
    assert (asked, (tmp_path / "ran").exists()) == ([], False)
