"""QeRL's noise: its schedule, its seeds, the canary under it, and that the policy itself is left as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.train import NoiseSettings
from grpo.trainer.errors import ModelError
from grpo.trainer.noise import NormNoise, hidden_norms, noisy_weight, rms_norm, sigma_of
from grpo.trainer.publishing import canary_ids
from grpo.transport.records import Canary
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from tests.infer.published import logprobs_of
from tests.trainer.bench import Bench, on_policy
from tests.trainer.models import canary_of, files_of, tiny_batch, tiny_policy, write_files

NOISE = {"enabled": True, "sigma_start": 0.2, "sigma_end": 0.05, "num_stages": 3}


def noise_of(policy: Any, *, seed: int = 7, max_steps: int = 6, **changes: Any) -> NormNoise:
    settings = NoiseSettings.model_validate(NOISE | changes)
    return NormNoise(hidden_norms(policy.causal_lm), settings, seed=seed, max_steps=max_steps)


def test_the_first_stage_has_no_noise_and_the_others_fall_geometrically_from_start_to_end() -> None:
    settings = NoiseSettings(enabled=True, sigma_start=0.08, sigma_end=0.02, num_stages=4)
    sigmas = [sigma_of(settings, version, max_steps=8) for version in range(9)]
    # 8 steps in 4 stages of 2. Noisy stages 1, 2, 3 with exponents 0, 1/2, 1 of 0.02 / 0.08 = 1/4:
    # 0.08, 0.08 * (1/4)^(1/2) = 0.04, 0.08 * 1/4 = 0.02. Version 8 samples no batch.
    assert sigmas == pytest.approx([0, 0, 0.08, 0.08, 0.04, 0.04, 0.02, 0.02, 0])


def test_noise_is_sigma_times_a_standard_normal_sample_on_top_of_the_weight() -> None:
    weight = torch.linspace(0.5, 1.5, 50_000)
    noise = noisy_weight(weight, sigma=0.1, seed=1, version=2, name="norm") - weight
    # standard errors: of the mean 0.1 / sqrt(50000) = 0.00045, of the deviation 0.1 / sqrt(2 * 50000) = 0.00032
    assert abs(float(noise.mean())) < 4 * 0.00045
    assert abs(float(noise.std()) - 0.1) < 4 * 0.00032
    assert abs(float((noise.abs() < 0.1).float().mean()) - 0.6827) < 0.01  # within one sigma
    twice = noisy_weight(weight, sigma=0.2, seed=1, version=2, name="norm") - weight
    torch.testing.assert_close(twice, 2 * noise, atol=1e-6, rtol=0)


def test_seed_version_and_name_each_give_another_sample_and_equal_ones_the_same() -> None:
    weight = torch.ones(64)

    def sample(seed: int, version: int, name: str) -> bytes:
        return noisy_weight(weight, sigma=0.1, seed=seed, version=version, name=name).numpy().tobytes()

    others = ((2, 2, "a"), (1, 3, "a"), (1, 2, "b"), (1, 23, "a"), (12, 3, "a"))
    assert len({sample(1, 2, "a"), *(sample(*given) for given in others)}) == 6
    # the same in every process, so that a run that goes on has the noise that it had
    again = noisy_weight(torch.ones(3), sigma=0.1, seed=1, version=2, name="a")
    assert again.tolist() == pytest.approx([1.2281227, 0.9583624, 0.9158603])


def test_the_norms_of_the_hidden_state_have_noise_and_those_of_queries_and_keys_have_none(tiny_model: Path) -> None:
    weights = noise_of(tiny_policy(tiny_model)).weights(2)
    layers = [f"model.layers.{n}.{name}.weight" for n in (0, 1) for name in ("input", "post_attention")]
    assert set(weights) == {name.replace(".weight", "_layernorm.weight") for name in layers} | {"model.norm.weight"}
    assert {tuple(weight.shape) for weight in weights.values()} == {(32,)}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_norms_of_queries_and_keys_have_none_where_they_are_as_wide_as_the_hidden_state() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = hidden_norms(Olmo2ForCausalLM(Olmo2Config(vocab_size=8, pad_token_id=0, **sizes)))
    layer = "model.layers.0"
    assert set(names) == {f"{layer}.post_attention_layernorm", f"{layer}.post_feedforward_layernorm", "model.norm"}


def test_a_norm_that_does_not_multiply_by_its_weight_is_refused() -> None:
    config = GemmaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=4
    )
    with pytest.raises(ModelError, match="GemmaRMSNorm"):
        hidden_norms(GemmaForCausalLM(config))


def test_the_canary_with_noise_is_hugging_faces_with_noisy_norms(tiny_model: Path, tmp_path: Path) -> None:
    policy = tiny_policy(tiny_model)
    weights = noise_of(policy).weights(3)
    ids = canary_ids(policy.causal_lm.config, seed=1)
    canary = canary_of(policy, ids, version=3, noise=weights)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    assert not base.load_state_dict(weights, strict=False).unexpected_keys
    served = PeftModel.from_pretrained(base, write_files(files_of(policy), tmp_path))
    assert canary.noisy_logprobs == pytest.approx(logprobs_of(served, canary.token_ids), abs=1e-5)
    changes = np.abs(np.subtract(canary.noisy_logprobs, canary.logprobs))  # type: ignore[arg-type]
    assert changes.max() > 0.01


def test_after_the_noise_the_policy_is_bit_for_bit_what_it_was(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    ids = canary_ids(policy.causal_lm.config, seed=1)
    base = canary_of(policy, ids, version=0).base_logprobs
    before = canary_of(policy, ids, version=3)
    weights = {name: norm.weight.detach().clone() for name, norm in hidden_norms(policy.causal_lm).items()}  # type: ignore[operator]
    noisy = canary_of(policy, ids, version=3, noise=noise_of(policy).weights(3))
    assert (noisy.logprobs, noisy.base_logprobs) == (before.logprobs, before.base_logprobs)
    assert canary_of(policy, ids, version=3) == before
    assert canary_of(policy, ids, version=0).base_logprobs == base
    for name, norm in hidden_norms(policy.causal_lm).items():
        assert torch.equal(norm.weight, weights[name])  # type: ignore[arg-type]


def test_noise_below_the_resolution_of_16_bits_is_not_rounded_away() -> None:
    # Between 1 and 2 bf16 has steps of 2^-7 = 0.0078, so a weight of 1.001 is 1 in it.
    x = (1.3 * torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    weight = torch.full((100_000,), 1.001)
    assert torch.equal(weight.to(torch.bfloat16), torch.ones(100_000, dtype=torch.bfloat16))
    clean, noisy = rms_norm(x, torch.ones(100_000), 1e-6), rms_norm(x, weight, 1e-6)
    assert noisy.dtype == torch.bfloat16
    # One rounding is off by at most 2^-8, 0.0016 for a normal share of it; over 100,000 elements that is 1e-5.
    change = noisy.double().abs().sum() / clean.double().abs().sum() - 1
    assert float(change) == pytest.approx(0.001, abs=5e-5)


@pytest.mark.filterwarnings("ignore")  # while torch compiles, it warns of its own code
def test_layers_that_were_compiled_see_the_noise(tiny_model: Path) -> None:
    policy = tiny_policy(tiny_model)
    ids = canary_ids(policy.causal_lm.config, seed=1)
    weights = noise_of(policy).weights(3)
    expected = canary_of(policy, ids, version=3, noise=weights).noisy_logprobs
    for layer in policy.causal_lm.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend="eager")
    assert canary_of(policy, ids, version=3).noisy_logprobs is None  # compiles
    compiled = canary_of(policy, ids, version=3, noise=weights).noisy_logprobs
    assert compiled == pytest.approx(expected, abs=1e-6)


def test_versions_are_published_with_the_noise_of_their_stage(tiny_model: Path, tmp_path: Path) -> None:
    noise = NOISE | {"sigma_start": 0.1, "sigma_end": 0.01}
    bench = Bench(tiny_model, tmp_path, max_steps=6, noise_scheduler=noise, seed=5)
    bench.train(*[on_policy(tiny_batch((6, 9)), bench.policy)] * 6)
    # 6 versions that sample, in 3 stages of 2: none, 0.1, 0.01; version 6 samples nothing
    sigmas = [bench.metrics(version)["policy/noise_sigma"] for version in range(1, 7)]
    assert sigmas == pytest.approx([0, 0.1, 0.1, 0.01, 0.01, 0])
    assert [version for version in range(7) if "noise.safetensors" in bench.files(version)] == [2, 3, 4, 5]
    expected = noise_of(tiny_policy(tiny_model), seed=5, **noise).weights(4)
    published = load(bench.files(4)["noise.safetensors"])
    assert published.keys() == expected.keys()
    assert all(torch.equal(published[name], expected[name]) for name in expected)
    for version in range(7):
        manifest, files = bench.policies.versions[version]
        assert manifest.spec.norm_noise
        noisy = Canary.from_json(files["canary.json"]).noisy_logprobs
        assert (noisy is not None) == (version in (2, 3, 4, 5))
