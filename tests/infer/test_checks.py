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
from grpo.transport.records import Canary, PolicySpec
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


# --- the files --------------------------------------------------------------------------------------------------------


def adapter(change: Callable[[dict[str, torch.Tensor]], object]) -> dict[str, Any]:
    """Files of an adapter with other tensors."""
    tensors = safetensors.torch.load(adapter_files()[ADAPTER_FILE])
    change(tensors)
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return {"adapter_model__safetensors": data}


def config(**settings: Any) -> dict[str, Any]:
    """Files of an adapter with other settings of PEFT's."""
    return {"adapter_config__json": json.dumps(json.loads(adapter_files()[ADAPTER_CONFIG_FILE]) | settings).encode()}


def weights(spec: PolicySpec, **change: np.ndarray | None) -> dict[str, Any]:
    """Files of a version in place with other weights, without those that are None."""
    named = {name.replace("__", "."): array for name, array in change.items()}
    content = {name: array for name, array in (weights_of(spec) | named).items() if array is not None}
    both = dict.fromkeys(weight_files(weights_of(spec))) | weight_files(content)
    return {name.replace(".", "__"): data for name, data in both.items()}


def canary(version: int = 3, **changes: Any) -> dict[str, Any]:
    return {"canary__json": canary_of(version, **changes).to_json()}


def noise(*sizes: int, **more: torch.Tensor) -> dict[str, Any]:
    tensors = {NORM: torch.ones(sizes)} if sizes else {}
    return {"noise__safetensors": safetensors.torch.save(tensors | {n.replace("__", "."): t for n, t in more.items()})}


BOTH = structs.replace(MERGED, target_modules=("q_proj", "up_proj"))
HALF = replace(IN_PLACE, dtype=torch.bfloat16)
Q__, NORM__ = Q.replace(".", "__"), NORM.replace(".", "__")
ONES = np.ones((4, 6), np.float32)
SPOILT: list[tuple[str, str, PolicySpec, BaseModel, dict[str, Any]]] = [
    # for another server; the message says the way out
    ("foreign_base", "same model", structs.replace(ADAPTER, base_model="other"), BASE, {}),
    ("foreign_base", "base_quantization: nf4", structs.replace(ADAPTER, quantization="nf4"), BASE, {}),
    ("kind", "enable_lora: true", ADAPTER, IN_PLACE, {}),
    ("kind", "enable_lora: false", structs.replace(ADAPTER, kind="full"), BASE, {}),
    ("norm_noise", "norm_noise: true", structs.replace(ADAPTER, norm_noise=True), BASE, {}),
    ("rank", "max_lora_rank: 16", structs.replace(ADAPTER, rank=16), BASE, {}),
    ("shape", "gate_proj", structs.replace(ADAPTER, target_modules=("q_proj", "gate_proj")), BASE, {}),
    # the canary
    ("partial", "", ADAPTER, BASE, {"canary__json": None}),
    ("corrupt", "", ADAPTER, BASE, {"canary__json": b"{}"}),
    ("corrupt", "", ADAPTER, BASE, canary(4)),
    ("corrupt", "", ADAPTER, BASE, canary(token_ids=(5, 6, 10**9))),
    ("corrupt", "", ADAPTER, BASE, canary(token_ids=(5, 6, -1))),
    # the adapter's tensors, by name
    ("not_finite", B, ADAPTER, BASE, adapter(lambda t: t[B][1].fill_(float("nan")))),
    ("not_finite", B, ADAPTER, BASE, adapter(lambda t: t.update({B: t[B] * 1e30}))),
    ("not_finite", "", ADAPTER, replace(BASE, dtype=torch.float16), adapter(lambda t: t.update({A: t[A] * 1e6}))),
    ("partial", B, ADAPTER, BASE, adapter(lambda t: t.pop(B))),
    ("shape", "layers.9", ADAPTER, BASE, adapter(lambda t: t.update({"layers.9.lora_A.weight": torch.ones(2, 4)}))),
    ("shape", "[5, 2], expected [6, 2]", ADAPTER, BASE, adapter(lambda t: t.update({B: t[B][:5]}))),
    ("rank", "[3, 4], expected [2, 4]", ADAPTER, BASE, adapter(lambda t: t.update({A: torch.ones(3, 4)}))),
    ("corrupt", "int64", ADAPTER, BASE, adapter(lambda t: t.update({A: t[A].long()}))),
    ("corrupt", "", ADAPTER, BASE, {"adapter_model__safetensors": b"nonsense"}),
    # settings that change what an adapter computes
    ("rank", "", ADAPTER, BASE, config(r=4)),
    ("corrupt", "", ADAPTER, BASE, config(lora_alpha=5)),
    ("corrupt", "use_rslora", ADAPTER, BASE, config(use_rslora=True)),
    ("corrupt", "alpha_pattern", ADAPTER, BASE, config(alpha_pattern={"q_proj": 1})),
    ("corrupt", "peft_type", ADAPTER, BASE, config(peft_type="IA3")),
    ("corrupt", "layers_to_transform", ADAPTER, BASE, config(layers_to_transform=[0])),
    ("corrupt", "a_setting_of_tomorrow", ADAPTER, BASE, config(a_setting_of_tomorrow=1)),
    # weights in the place of the model's own
    ("partial", "", FULL, IN_PLACE, weights(FULL, **{NORM__: None})),
    ("shape", "", FULL, IN_PLACE, weights(FULL, lm_head__weight=ONES)),
    ("shape", "", FULL, IN_PLACE, weights(FULL, **{Q__: ONES})),
    ("not_finite", "", FULL, IN_PLACE, weights(FULL, **{Q__: np.full((6, 4), np.nan, np.float32)})),
    ("partial", "", FULL, IN_PLACE, {"model__safetensors__index__json": None}),
    ("partial", "", MERGED, IN_PLACE, weights(MERGED, **{Q__: None})),
    ("shape", "", MERGED, IN_PLACE, weights(MERGED, **{NORM__: np.ones(4, np.float32)})),
    ("partial", "", BOTH, IN_PLACE, weights(BOTH, **{Q__: None})),
    ("rounding", "dtype: float32", MERGED, HALF, {}),
    # noise
    ("partial", "", NOISY, WITH_NOISE, noise()),
    ("shape", "", NOISY, WITH_NOISE, noise(4, model__other__weight=torch.ones(4))),
    ("shape", "", NOISY, WITH_NOISE, noise(5)),
    ("not_finite", "", NOISY, WITH_NOISE, noise(**{NORM__: torch.tensor([1, 1, 1, float("nan")])})),
    ("partial", "", NOISY, WITH_NOISE, canary()),
    ("partial", "", NOISY, WITH_NOISE, {"noise__safetensors": None}),
    ("corrupt", "", ADAPTER, BASE, {"noise__safetensors": noise_file(), **canary(noisy=True)}),
]
"""Reason, words of the message, and how the version differs from a right one: its spec, the server, its files."""


@pytest.mark.parametrize(("reason", "words", "spec", "base", "files"), SPOILT)
def test_a_spoilt_version_is_refused_with_its_reason(
    run: RunFolder, reason: str, words: str, spec: PolicySpec, base: BaseModel, files: dict[str, Any]
) -> None:
    publish(run, 3, spec, **files)
    error = refusal(run, base=base)
    assert (error.reason, words in str(error)) == (reason, True)


def test_large_values_and_16_bits_are_right_where_the_servers_type_holds_them(run: RunFolder) -> None:
    publish(run, 3, **adapter(lambda t: t.update({A: t[A] * 1e6})))
    check(run)
    publish(run, 5, structs.replace(MERGED, dtype="bfloat16"))
    check(run, 5, HALF)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [(BASE.shapes | {Q: (4, 6)}, "shape"), ({Q: (6, 4)}, "partial"), (BASE.shapes | {"other": (1,)}, "shape")],  # type: ignore[operator]
)
def test_announced_weights_that_do_not_fit_are_refused(run: RunFolder, shapes: Any, reason: str) -> None:
    announce(run, 3, shapes)
    assert refusal(run, base=IN_PLACE).reason == reason


# --- the effect -------------------------------------------------------------------------------------------------------


def effect(served: Sequence[float], base: Sequence[float] = (-1.0, -2.5), **changes: Any) -> CanaryFigures:
    """Of a version that moves the second of two log-probabilities by half a nat, from -2.5 to -2."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "tolerance": None, "noiseless": None}
    settings |= {name: changes.pop(name) for name in [*settings] if name in changes}
    fields = {"logprobs": (-1.0, -2.0), "base_logprobs": (-1.0, -2.5), "dtype": changes.pop("trainer", "float32")}
    return check_effect(canary_of(3, **(fields | changes)), served, base, **settings)


def reason_of(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(PolicyRefused) as caught:
        effect(*args, **kwargs)
    return caught.value.reason


def test_a_canary_longer_than_the_server_takes_is_proved_by_its_beginning(run: RunFolder) -> None:
    numbers = tuple(-0.1 * place for place in range(8))
    publish(run, 3, **canary(token_ids=(1,) * 9, logprobs=numbers, base_logprobs=numbers))
    [cut] = check(run)
    assert (len(cut.token_ids), cut.logprobs) == (BASE.max_model_len - 1, numbers[:6])


def test_in_float32_the_largest_difference_counts_and_in_16_bits_the_mean() -> None:
    figures = effect([-1.0, -2.00005])
    assert (figures.max_abs, figures.mean_abs) == pytest.approx((5e-5, 2.5e-5))
    assert (figures.tolerance, figures.measure) == (1e-4, "max_abs")
    assert reason_of([-1.0, -2.0002]) == "canary_mismatch"
    assert effect([-1.0, -2.005], device="cuda").tolerance == 1e-2  # TF32
    assert effect([-1.0, -2.01], dtype="float16").tolerance == 0.01
    for coarser in ({"dtype": "bfloat16"}, {"trainer": "bfloat16"}):
        figures = effect([-1.0, -2.08], **coarser)  # 0.08 at one of two tokens is 0.04 on average
        assert (figures.measure, figures.tolerance) == ("mean_abs", 0.05)
        assert reason_of([-1.0, -2.12], **coarser) == "canary_mismatch"


def test_a_version_may_differ_by_twice_what_the_base_does_and_the_base_only_so_far() -> None:
    """bfloat16: 0.05 nats are always allowed, and the base may differ by 0.15."""
    half = {"dtype": "bfloat16", "trainer": "bfloat16"}
    figures = effect([-1.07, -2.07], [-1.04, -2.54], **half)
    assert (figures.gap, figures.base_gap, figures.tolerance) == pytest.approx((0.07, 0.04, 0.08))
    assert (figures.base_max_abs, figures.base_mean_abs) == pytest.approx((0.04, 0.04))
    assert reason_of([-1.09, -2.09], [-1.04, -2.54], **half) == "canary_mismatch"
    assert effect([-1.14, -2.14], [-1.14, -2.64], **half).tolerance == pytest.approx(0.28)
    assert reason_of([-1.0, -2.0], [-1.16, -2.66], **half) == "base_mismatch"
    assert effect([-1.0, -2.0], [-1.16, -2.66], **half, tolerance=0.01).agrees, "a tolerance of one's own is all"
    assert reason_of([-1.02, -2.02], [-1.05, -2.55], **half, tolerance=0.01) == "canary_mismatch"
    assert effect([-1.0, -2.00039], [-1.0, -2.5002]).tolerance == pytest.approx(4e-4)
    assert reason_of([-1.0, -2.0], [-1.0, -2.5004]) == "base_mismatch"


def test_a_server_that_answers_as_without_the_adapter_or_the_noise_has_not_applied_it() -> None:
    for tolerance in (None, 1.0):
        assert reason_of([-1.0, -2.5], tolerance=tolerance) == "not_applied"
    noisy = {"noiseless": [-1.0, -2.0], "noisy_logprobs": (-1.4, -2.0)}
    assert reason_of([-1.0, -2.0], **noisy) == "noise_not_applied"
    assert reason_of([-1.3, -2.0], **noisy) == "noise_mismatch"
    of_zero = {"noiseless": [-1.0, -2.5], "noisy_logprobs": (-1.4, -2.5), "logprobs": (-1.0, -2.5), "is_zero": True}
    assert reason_of([-1.0, -2.5], tolerance=1.0, **of_zero) == "noise_not_applied"


def test_a_change_too_small_to_tell_is_not_taken_for_one_that_is_not_applied() -> None:
    assert effect([-1.0, -2.5], logprobs=(-1.0, -2.5), is_zero=True).max_abs == 0
    effect([-1.0, -2.5], logprobs=(-1.0, -2.5000001))
    effect([-1.0, -2.0], noiseless=[-1.0, -2.0], dtype="bfloat16", noisy_logprobs=(-1.04, -2.0))
    # The trainer's own rounding moves a token by 0.06 nats where a small adapter is added in bfloat16.
    effect([-1.0, -2.5], [-1.0, -2.5], dtype="bfloat16", trainer="bfloat16", logprobs=(-1.06, -2.5))
    effect([-1.0, -2.5], [-1.06, -2.56], dtype="bfloat16", trainer="bfloat16", logprobs=(-1.06, -2.56))


def test_a_model_that_is_damaged_or_has_no_tokenizer_is_told_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tensor_shapes(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        check_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    check_tokenizer(tmp_path)
