"""Every way in which a version can be wrong, with real small files and without vLLM."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from grpo.infer.canary import check_effect
from grpo.infer.checks import BaseModel, check_tokenizer, check_version, read_version, tensor_shapes, version_folder
from grpo.transport.errors import PolicyRefused
from grpo.transport.http import CanaryFigures
from grpo.transport.records import Canary
from grpo.transport.run import RunFolder, create_run
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from msgspec import structs

from tests.infer.versions_fakes import (
    ADAPTER,
    BASE,
    FULL,
    MERGED,
    NOISY,
    NORMS,
    SEVERAL,
    adapter_files,
    announce,
    canary_of,
    noise_file,
    publish,
    weight_files,
    weights_of,
)

IN_PLACE = replace(BASE, max_rank=None)
WITH_NOISE = replace(BASE, noisy_norms=NORMS)
Q, NORM = "model.layers.0.q_proj.weight", "model.norm.weight"
A, B = (f"base_model.model.model.layers.0.q_proj.lora_{part}.weight" for part in "AB")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run")


def check(run: RunFolder, version: int = 3, base: BaseModel = BASE) -> list[Canary]:
    folder = version_folder(run.path, run_id=run.run_id, version=version)
    manifest, files = read_version(folder, run_id=run.run_id, version=version)
    return check_version(manifest, folder, files, base)


def refusal(run: RunFolder, version: int = 3, base: BaseModel = BASE) -> PolicyRefused:
    with pytest.raises(PolicyRefused) as caught:
        check(run, version, base)
    return caught.value


@pytest.mark.parametrize(
    ("spec", "base", "num"),
    [(ADAPTER, BASE, 1), (SEVERAL, BASE, 2), (NOISY, WITH_NOISE, 1), (FULL, IN_PLACE, 1), (MERGED, IN_PLACE, 1)],
)
def test_right_versions_pass(run: RunFolder, spec: Any, base: BaseModel, num: int) -> None:
    publish(run, 3, spec)
    assert len(check(run, base=base)) == num


# --- the folder -------------------------------------------------------------------------------------------------------


def test_what_is_not_the_runs_whole_version_is_refused(run: RunFolder, tmp_path: Path) -> None:
    assert refusal(run).reason == "missing"
    file = publish(run, 3) / ADAPTER_FILE
    whole = file.read_bytes()
    for spoiled in (whole[:-7], whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(spoiled)
        assert refusal(run).reason == "corrupt"
    (publish(run, 4) / "STABLE").unlink()
    assert refusal(run, 4).reason == "corrupt"
    publish(RunFolder(path=run.path, run_id="stranger"), 5)
    assert refusal(run, 5).reason == "stale_run"
    assert refusal(RunFolder(path=run.path, run_id="another"), 4).reason == "stale_run"
    assert refusal(RunFolder(path=tmp_path / "nowhere", run_id="r")).reason == "missing"


def test_folders_and_files_that_lead_out_of_the_broadcasts_are_refused(run: RunFolder, tmp_path: Path) -> None:
    elsewhere = publish(run, 3).rename(tmp_path / "elsewhere")
    (run.broadcasts / "step_000003").symlink_to(elsewhere)
    assert refusal(run).reason == "outside"
    file = publish(run, 4) / ADAPTER_FILE
    file.symlink_to(file.rename(tmp_path / "weights"))
    assert refusal(run, 4).reason == "outside"


# --- what it belongs to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "base", "reason", "words"),
    [
        ({"base_model": "other"}, BASE, "foreign_base", "same model"),
        ({"quantization": "nf4"}, BASE, "foreign_base", "base_quantization: nf4"),
        ({}, IN_PLACE, "kind", "enable_lora: true"),
        ({"kind": "full"}, BASE, "kind", "enable_lora: false"),
        ({"norm_noise": True}, BASE, "norm_noise", "norm_noise: true"),
        ({"rank": 16}, BASE, "rank", "max_lora_rank: 16"),
        ({"target_modules": ("q_proj", "gate_proj")}, BASE, "shape", "gate_proj"),
    ],
)
def test_a_version_for_another_server_is_refused_with_the_way_out(
    run: RunFolder, change: dict[str, Any], base: BaseModel, reason: str, words: str
) -> None:
    publish(run, 3, structs.replace(ADAPTER, **change))
    error = refusal(run, base=base)
    assert (error.reason, words in str(error)) == (reason, True)


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        (None, "partial"),
        (b"{}", "corrupt"),
        (canary_of(4).to_json(), "corrupt"),
        (canary_of(3, token_ids=(5, 6, 10**9)).to_json(), "corrupt"),
        (canary_of(3, token_ids=(5, 6, -1)).to_json(), "corrupt"),
        (canary_of(3, token_ids=(1,) * 9, logprobs=(0.0,) * 8, base_logprobs=(0.0,) * 8).to_json(), "corrupt"),
    ],
)
def test_a_canary_that_is_none_is_refused(run: RunFolder, canary: bytes | None, reason: str) -> None:
    publish(run, 3, canary__json=canary)
    assert refusal(run).reason == reason


# --- adapters ---------------------------------------------------------------------------------------------------------


def with_tensors(run: RunFolder, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = safetensors.torch.load(adapter_files()[ADAPTER_FILE])
    change(tensors)
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    publish(run, 3, adapter_model__safetensors=data)


@pytest.mark.parametrize(
    ("change", "reason", "named"),
    [
        (lambda t: t[B][1].fill_(float("nan")), "not_finite", B),
        (lambda t: t.update({B: t[B] * 1e30}), "not_finite", B),
        (lambda t: t.pop(B), "partial", B),
        (lambda t: t.update({"layers.9.lora_A.weight": torch.ones(2, 4)}), "shape", "layers.9"),
        (lambda t: t.update({B: t[B][:5]}), "shape", "[5, 2], expected [6, 2]"),
        (lambda t: t.update({A: torch.ones(3, 4)}), "rank", "[3, 4], expected [2, 4]"),
        (lambda t: t.update({A: t[A].long()}), "corrupt", "int64"),
    ],
)
def test_a_spoiled_adapter_is_refused_by_the_name_of_the_tensor(
    run: RunFolder, change: Callable[[dict[str, torch.Tensor]], object], reason: str, named: str
) -> None:
    with_tensors(run, change)
    error = refusal(run)
    assert (error.reason, named in str(error)) == (reason, True)


def test_a_value_that_overflows_in_the_servers_type_is_refused(run: RunFolder) -> None:
    with_tensors(run, lambda t: t.update({A: t[A] * 1e6}))
    check(run)
    assert refusal(run, base=replace(BASE, dtype=torch.float16)).reason == "not_finite"


def test_bytes_that_are_no_safetensors_are_refused(run: RunFolder) -> None:
    publish(run, 3, adapter_model__safetensors=b"nonsense")
    assert refusal(run).reason == "corrupt"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"r": 4}, "rank"),
        ({"lora_alpha": 5}, "corrupt"),
        ({"use_dora": True}, "corrupt"),
        ({"peft_type": "IA3"}, "corrupt"),
        ({"layers_to_transform": [0]}, "corrupt"),
        ({"alora_invocation_tokens": [1]}, "corrupt"),
        ({"a_setting_of_tomorrow": 1}, "corrupt"),
    ],
)
def test_a_setting_that_changes_what_an_adapter_computes_is_refused(
    run: RunFolder, setting: dict[str, Any], reason: str
) -> None:
    config = json.loads(adapter_files()[ADAPTER_CONFIG_FILE]) | setting
    publish(run, 3, adapter_config__json=json.dumps(config).encode())
    assert refusal(run).reason == reason


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (FULL, {NORM: None}, "partial"),
        (FULL, {"lm_head.weight": np.ones((3, 4), np.float32)}, "shape"),
        (FULL, {Q: np.ones((4, 6), np.float32)}, "shape"),
        (FULL, {Q: np.full((6, 4), np.nan, np.float32)}, "not_finite"),
        (MERGED, {Q: None}, "partial"),
        (MERGED, {NORM: np.ones(4, np.float32)}, "shape"),
        (structs.replace(MERGED, target_modules=("q_proj", "up_proj")), {Q: None}, "partial"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    run: RunFolder, spec: Any, change: dict[str, np.ndarray | None], reason: str
) -> None:
    content = {name: array for name, array in (weights_of(spec) | change).items() if array is not None}
    files = {name.replace(".", "__"): data for name, data in weight_files(content).items()}
    old = {name.replace(".", "__"): None for name in weight_files(weights_of(spec))}
    publish(run, 3, spec, **(old | files))
    assert refusal(run, base=IN_PLACE).reason == reason


def test_weights_without_their_index_and_float32_ones_for_16_bits_are_refused(run: RunFolder) -> None:
    publish(run, 3, FULL, model__safetensors__index__json=None)
    assert refusal(run, base=IN_PLACE).reason == "partial"
    half = replace(IN_PLACE, dtype=torch.bfloat16)
    publish(run, 4, MERGED)
    assert refusal(run, 4, half).reason == "rounding"
    publish(run, 5, structs.replace(MERGED, dtype="bfloat16"))
    check(run, 5, half)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [(BASE.shapes | {Q: (4, 6)}, "shape"), ({Q: (6, 4)}, "partial"), (BASE.shapes | {"other": (1,)}, "shape")],  # type: ignore[operator]
)
def test_announced_weights_that_do_not_fit_are_refused(run: RunFolder, shapes: Any, reason: str) -> None:
    announce(run, 3, shapes)
    assert refusal(run, base=IN_PLACE).reason == reason


# --- noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "partial"),
        ({NORM: torch.ones(4), "model.other.weight": torch.ones(4)}, "shape"),
        ({NORM: torch.ones(5)}, "shape"),
        ({NORM: torch.tensor([1, 1, 1, float("nan")])}, "not_finite"),
    ],
)
def test_bad_noise_is_refused(run: RunFolder, tensors: dict[str, torch.Tensor], reason: str) -> None:
    publish(run, 3, NOISY, noise__safetensors=safetensors.torch.save(tensors))
    assert refusal(run, base=WITH_NOISE).reason == reason


def test_noise_without_its_proof_and_noise_in_a_run_without_are_refused(run: RunFolder) -> None:
    publish(run, 3, NOISY, canary__json=canary_of(3).to_json())
    assert refusal(run, base=WITH_NOISE).reason == "partial"
    publish(run, 4, NOISY, noise__safetensors=None)
    assert refusal(run, 4, WITH_NOISE).reason == "partial"
    noisy = {"noise__safetensors": noise_file(), "canary__json": canary_of(5, noisy=True).to_json()}
    publish(run, 5, ADAPTER, **noisy)
    assert refusal(run, 5).reason == "corrupt"


# --- the effect -------------------------------------------------------------------------------------------------------


def effect(
    served: Sequence[float],
    without: Sequence[float] = (-1.0, -2.5),
    *,
    dtype: str = "float32",
    device: str = "cpu",
    tolerance: float | None = None,
    noise: bool = False,
    **changes: Any,
) -> CanaryFigures:
    """Of a version that moves the second of two log-probabilities by half a nat, from -2.5 to -2."""
    fields = {"logprobs": (-1.0, -2.0), "base_logprobs": (-1.0, -2.5), "dtype": dtype} | changes
    canary = canary_of(3, **fields)
    return check_effect(canary, served, without, dtype=dtype, device=device, tolerance=tolerance, noise=noise)


def reason_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(PolicyRefused) as caught:
        effect(*args, **kwargs)
    return caught.value.reason


def test_in_float32_the_largest_difference_counts_and_in_16_bits_the_mean() -> None:
    figures = effect([-1.0, -2.00005])
    assert (figures.max_abs, figures.mean_abs) == pytest.approx((5e-5, 2.5e-5))
    assert (figures.tolerance, figures.measure) == (1e-4, "max_abs")
    assert reason_of([-1.0, -2.0002]) == "canary_mismatch"
    assert effect([-1.0, -2.005], device="cuda").tolerance == 1e-2  # TF32
    figures = effect([-1.0, -2.08], dtype="bfloat16")
    assert (figures.measure, figures.tolerance) == ("mean_abs", 0.05)  # 0.08 at one of two tokens is 0.04 on average
    assert reason_of([-1.0, -2.12], dtype="bfloat16") == "canary_mismatch"
    assert effect([-1.0, -2.01], dtype="float16").tolerance == 0.01


def test_the_coarser_type_of_the_two_sides_decides_what_is_compared() -> None:
    for trainer, server in (("bfloat16", "float32"), ("float32", "bfloat16")):
        canary = canary_of(3, logprobs=(-1.0, -2.0), base_logprobs=(-1.0, -2.5), dtype=trainer)
        figures = check_effect(
            canary, [-1.0, -2.08], [-1.0, -2.5], dtype=server, device="cpu", tolerance=None, noise=False
        )
        assert (figures.measure, figures.tolerance) == ("mean_abs", 0.05)


def test_the_noise_of_a_version_whose_adapter_is_zero_must_be_applied_too() -> None:
    zero = {"logprobs": (-1.0, -2.5), "is_zero": True}
    assert effect([-1.0, -2.5], **zero).max_abs == 0
    noisy = {"noise": True, "noisy_logprobs": (-1.4, -2.5), "tolerance": 1.0, **zero}
    assert reason_of([-1.0, -2.5], [-1.0, -2.5], **noisy) == "noise_not_applied"


def test_a_server_that_answers_as_without_the_adapter_or_the_noise_has_not_applied_it() -> None:
    for tolerance in (None, 1.0):
        assert reason_of([-1.0, -2.5], tolerance=tolerance) == "not_applied"
    noisy = {"noise": True, "noisy_logprobs": (-1.4, -2.0)}
    assert reason_of([-1.0, -2.0], [-1.0, -2.0], **noisy) == "noise_not_applied"
    assert reason_of([-1.3, -2.0], [-1.0, -2.0], **noisy) == "noise_mismatch"


def test_a_change_too_small_to_tell_is_not_taken_for_one_that_is_not_applied() -> None:
    effect([-1.0, -2.5], logprobs=(-1.0, -2.5), is_zero=True)
    effect([-1.0, -2.5], logprobs=(-1.0, -2.5000001))
    effect([-1.0, -2.0], [-1.0, -2.0], dtype="bfloat16", noise=True, noisy_logprobs=(-1.04, -2.0))


def test_a_model_that_is_damaged_or_has_no_tokenizer_is_told_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tensor_shapes(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    check_tokenizer(tmp_path)
