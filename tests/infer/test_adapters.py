"""Every way in which an adapter can be wrong, with real small files and without vLLM."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from msgspec import structs

from infer.adapters import BaseModel, check_adapter, check_effect, linear_shapes
from transport.errors import PolicyRefused
from transport.records import Canary, PolicyManifest, PolicySpec

RANK = 2
TARGETS = ("q_proj", "up_proj")
SHAPES = {f"model.layers.{i}.{m}": s for i in range(2) for m, s in (("q_proj", (6, 4)), ("up_proj", (8, 4)))}
BASE = BaseModel(identity="base", linear_shapes=SHAPES | {"lm_head": (10, 4)}, max_rank=8, dtype=torch.float32)
SPEC = PolicySpec(base_model="base", rank=RANK, alpha=4, target_modules=TARGETS, sequence_len=64, dtype="float32")
A0 = "base_model.model.model.layers.0.q_proj.lora_A.weight"
B0 = "base_model.model.model.layers.0.q_proj.lora_B.weight"

Tensors = dict[str, torch.Tensor]


def whole() -> Tensors:
    """A right adapter."""
    tensors = {}
    for module, (num_outputs, num_inputs) in SHAPES.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.ones(RANK, num_inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.ones(num_outputs, RANK)
    return tensors


def refusal(
    tensors: Tensors | bytes,
    spec: PolicySpec = SPEC,
    config: dict[str, object] | None = None,
    base: BaseModel = BASE,
) -> PolicyRefused:
    """How the adapter is refused."""
    with pytest.raises(PolicyRefused) as caught:
        check(tensors, spec, config, base)
    return caught.value


def check(
    tensors: Tensors | bytes,
    spec: PolicySpec = SPEC,
    config: dict[str, object] | None = None,
    base: BaseModel = BASE,
) -> None:
    right: dict[str, object] = {"r": spec.rank, "lora_alpha": spec.alpha, "target_modules": [*spec.target_modules]}
    files = {
        "adapter_model.safetensors": tensors if isinstance(tensors, bytes) else safetensors.torch.save(tensors),
        "adapter_config.json": json.dumps(right | (config or {})).encode(),
    }
    check_adapter(PolicyManifest(run_id="r", version=3, spec=spec, files={}), files, base)


def test_a_right_adapter_passes() -> None:
    check(whole())


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    tensors = whole()
    return tensors | {name: change(tensors[name]).contiguous()}


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[1, 1] = value
        return tensor

    error = refusal(changed(B0, spoil))
    assert error.reason == "not_finite"
    assert B0 in str(error)


def test_a_value_that_overflows_in_the_servers_type_is_refused() -> None:
    half = replace(BASE, dtype=torch.float16)
    assert refusal(changed(A0, lambda a: a * 1e5), base=half).reason == "not_finite"


def test_an_update_that_would_overflow_activations_is_refused() -> None:
    assert refusal(changed(B0, lambda b: b * 1e30)).reason == "not_finite"


def test_a_partial_adapter_is_refused_with_the_first_missing_tensor() -> None:
    tensors = whole()
    del tensors[B0]
    error = refusal(tensors)
    assert error.reason == "partial"
    assert B0 in str(error)


def test_a_tensor_that_no_layer_has_is_refused() -> None:
    error = refusal(whole() | {"base_model.model.model.layers.9.q_proj.lora_A.weight": torch.ones(RANK, 4)})
    assert error.reason == "shape"
    assert "layers.9" in str(error)


def test_a_wrong_shape_is_refused_with_both_shapes() -> None:
    error = refusal(changed(B0, lambda b: b[:5]))
    assert error.reason == "shape"
    assert "[5, 2]" in str(error)


def test_a_tensor_of_another_rank_than_the_manifests_is_refused() -> None:
    error = refusal(changed(A0, lambda a: torch.ones(3, 4)))
    assert error.reason == "rank"
    assert "[3, 4]" in str(error)


def test_a_rank_above_the_servers_is_refused_with_the_way_out() -> None:
    error = refusal(whole(), spec=structs.replace(SPEC, rank=16))
    assert error.reason == "rank"
    assert "max_lora_rank" in str(error)


def test_a_configuration_that_contradicts_the_manifest_is_refused() -> None:
    assert refusal(whole(), config={"r": 4}).reason == "rank"
    assert refusal(whole(), config={"lora_alpha": 5}).reason == "corrupt"


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"peft_type": "IA3"},
        {"layers_to_transform": [0]},
        {"exclude_modules": ["q_proj"]},
        {"bias": "all"},
        {"fan_in_fan_out": True},
        {"alora_invocation_tokens": [1]},
        {"a_setting_of_tomorrow": 1},
    ],
)
def test_a_setting_that_changes_what_an_adapter_computes_is_refused(setting: dict[str, Any]) -> None:
    assert refusal(whole(), config=setting).reason == "corrupt"


def test_another_base_model_is_refused() -> None:
    assert refusal(whole(), spec=structs.replace(SPEC, base_model="other")).reason == "foreign_base"


def test_bytes_that_are_no_safetensors_are_refused() -> None:
    data = safetensors.torch.save(whole())
    for bad in (b"", b"nonsense", data[: len(data) // 2], data[:-1]):
        assert refusal(bad).reason == "corrupt"


def test_a_target_that_the_base_model_lacks_is_refused() -> None:
    error = refusal(whole(), spec=structs.replace(SPEC, target_modules=(*TARGETS, "gate_proj")))
    assert "gate_proj" in str(error)


def test_shapes_come_from_the_headers_of_all_weight_files(tmp_path: Path) -> None:
    one = {"model.layers.0.q_proj.weight": torch.zeros(6, 4), "model.norm.weight": torch.zeros(4)}
    safetensors.torch.save_file(one, tmp_path / "a.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file({"model.layers.1.q_proj.weight": torch.zeros(6, 4)}, tmp_path / "b.safetensors")
    assert linear_shapes(tmp_path) == {"model.layers.0.q_proj": (6, 4), "model.layers.1.q_proj": (6, 4)}


def canary(**changes: object) -> Canary:
    """Three tokens; the adapter changes the second log-probability by half a nat."""
    fields: dict[str, object] = {
        "version": 3,
        "token_ids": (1, 2, 3),
        "logprobs": (-1.0, -2.0),
        "base_logprobs": (-1.0, -2.5),
        "dtype": "float32",
        "is_zero": False,
    }
    return Canary(**(fields | changes))  # type: ignore[arg-type]


def test_agreement_within_tolerance_is_reported_by_its_largest_and_mean_difference() -> None:
    report = check_effect(canary(), policy=[-1.0, -2.00005], base=[-1.0, -2.5], server_dtype="float32", tolerance=None)
    # |-2.00005 + 2| = 5e-5 is the largest of two, the mean is half of it
    assert report.max_abs == pytest.approx(5e-5)
    assert report.mean_abs == pytest.approx(2.5e-5)
    assert (report.tolerance, report.measure) == (1e-4, "max_abs")


def test_one_difference_beyond_the_tolerance_is_a_mismatch_in_float32() -> None:
    with pytest.raises(PolicyRefused) as caught:
        check_effect(canary(), policy=[-1.0, -2.0002], base=[-1.0, -2.5], server_dtype="float32", tolerance=None)
    assert caught.value.reason == "canary_mismatch"


def test_the_mean_counts_where_one_side_computes_in_16_bits() -> None:
    report = check_effect(canary(), policy=[-1.0, -2.08], base=[-1.0, -2.5], server_dtype="bfloat16", tolerance=None)
    assert report.measure == "mean_abs"  # 0.08 at one of two tokens is 0.04 on average, below 0.05
    with pytest.raises(PolicyRefused):
        check_effect(canary(), policy=[-1.0, -2.12], base=[-1.0, -2.5], server_dtype="bfloat16", tolerance=None)


def test_a_server_that_answers_as_the_base_model_has_not_applied_the_adapter() -> None:
    for tolerance in (None, 10.0):
        with pytest.raises(PolicyRefused) as caught:
            check_effect(canary(), policy=[-1.0, -2.5], base=[-1.0, -2.5], server_dtype="float32", tolerance=tolerance)
        assert caught.value.reason == "not_applied"


def test_a_zero_adapter_may_answer_as_the_base_model() -> None:
    zero = canary(logprobs=(-1.0, -2.5), is_zero=True)
    check_effect(zero, policy=[-1.0, -2.5], base=[-1.0, -2.5], server_dtype="float32", tolerance=None)


def test_an_update_below_the_noise_of_float32_is_not_taken_for_one_that_is_not_applied() -> None:
    tiny = canary(logprobs=(-1.0, -2.5000001))
    check_effect(tiny, policy=[-1.0, -2.5], base=[-1.0, -2.5], server_dtype="float32", tolerance=None)
