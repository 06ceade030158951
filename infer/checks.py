"""Checks of a published version's files before vLLM sees them.

vLLM would accept a partial adapter silently, and after a value that is not finite fail every later request until it is
restarted.

Shapes: `r` rank, `I` and `O` a layer's input and output features; A is [r, I], B is [O, r].
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from grpo.transport.errors import CorruptError, PolicyRefused, SchemaVersionError, StaleRunError
from grpo.transport.folders import step_folder
from grpo.transport.records import Canary, PolicyManifest, PolicySpec, Quantization, adapter_folders
from grpo.transport.run import current_run_id
from grpo.transport.weights.nccl import ANNOUNCEMENT_FILE, Announcement
from grpo.transport.weights.shards import INDEX_FILE, weight_map
from grpo.transport.weights.store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    CANARY_FILE,
    NOISE_FILE,
    AdapterConfig,
    read_adapter_config,
    verify_policy,
)
from safetensors import SafetensorError, safe_open

PEFT_PREFIX = "base_model.model."
LARGEST_UPDATE = 1e6
"""Bound on scaling * |A| * |B| of one layer, above which an overflow could spoil vLLM's cache for later requests."""
_TOKENIZERS = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """The served base model, which a version must fit."""

    identity: str
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor of the checkpoint, by name."""
    quantization: Quantization | None = None
    """Format that the base's values were rounded to; None for a plain base."""
    vocab_size: int
    max_model_len: int
    max_rank: int | None
    """Highest rank that the server was started for; None where versions replace the model's own weights."""
    dtype: torch.dtype
    """Type that the server casts weights to."""
    noisy_norms: Mapping[str, int] = field(default_factory=dict)
    """Size of each norm weight that can carry a version's noise, by the checkpoint's name."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of versions that are served."""
        return ["merged", "full"] if self.max_rank is None else ["adapter"]


def is_stored_quantized(model_dir: Path) -> bool:
    """Returns whether the checkpoint holds its linear layers in another form than plain numbers."""
    config = json.loads((model_dir / "config.json").read_bytes())
    return "quantization_config" in config or (model_dir / "hf_quant_config.json").is_file()


def tensor_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of the checkpoint by name; for one that is stored quantized, the shapes of the
    model's plain weights. Raises FileNotFoundError if it has no safetensors files, and ValueError for a damaged one."""
    if not (files := sorted(model_dir.glob("*.safetensors"))):
        raise FileNotFoundError(f"{model_dir} has no .safetensors weights; convert the model to safetensors")
    if is_stored_quantized(model_dir):
        from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds

        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        vars(config).pop("quantization_config", None)
        with torch.device("meta"):
            return {
                name: tuple(one.shape)
                for name, one in AutoModelForCausalLM.from_config(config, trust_remote_code=False).named_parameters()
            }
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or incomplete ({error}); get the model again") from error
    return shapes


def check_tokenizer(model_dir: Path) -> None:
    """Raises FileNotFoundError for a model without any file of a tokenizer; vLLM would only say that a list is
    empty."""
    if not any(file for pattern in _TOKENIZERS for file in model_dir.glob(pattern)):
        raise FileNotFoundError(
            f"{model_dir} has no tokenizer; save it there: tokenizer.save_pretrained({str(model_dir)!r})"
        )


def version_folder(output_dir: Path, *, run_id: str, version: int) -> Path:
    """Returns the version's folder, which must lie in the run's broadcasts, with all files in itself. Raises
    `PolicyRefused`."""
    here = current_run_id(output_dir)
    if here is None:
        raise PolicyRefused("missing", f"there is no run in {output_dir}; give all programs one output_dir")
    if here != run_id:
        raise PolicyRefused("stale_run", f"the request names run {run_id}, and {output_dir} holds run {here}")
    folder = step_folder(output_dir.resolve() / "broadcasts", version)
    if not folder.is_symlink() and not folder.exists():
        raise PolicyRefused("missing", f"version {version} is not published: no folder {folder}")
    for path in (folder, *folder.rglob("*")):
        if path.resolve() != path:
            raise PolicyRefused("outside", f"{path} leads to {path.resolve()}, outside the run's broadcasts")
    return folder


def read_version(folder: Path, *, run_id: str, version: int) -> tuple[PolicyManifest, dict[str, bytes]]:
    """Returns what `verify_policy` does. Raises `PolicyRefused`."""
    try:
        return verify_policy(folder, run_id=run_id, version=version)
    except StaleRunError as error:
        raise PolicyRefused("stale_run", str(error)) from error
    except (CorruptError, SchemaVersionError) as error:
        raise PolicyRefused("corrupt", str(error)) from error


def check_version(manifest: PolicyManifest, folder: Path, files: Mapping[str, bytes], base: BaseModel) -> list[Canary]:
    """Checks all files, and returns the canaries of the version's adapters, or the one canary of its weights. Raises
    `PolicyRefused`."""
    _check_spec(manifest, base)
    folders = adapter_folders(manifest.spec.adapters)
    canaries = [_canary(manifest, files, own, base) for own in folders]
    if len({canary.token_ids for canary in canaries}) > 1:
        raise PolicyRefused("corrupt", f"version {manifest.version} has canaries of different tokens")
    if base.max_rank is None:
        _check_weights(manifest, folder, files, base)
    else:
        for own in folders:
            _check_adapter(manifest, files, base, own)
    _check_noise(manifest, files, canaries, base)
    return canaries


def _check_spec(manifest: PolicyManifest, base: BaseModel) -> None:
    spec, what = manifest.spec, f"version {manifest.version}"
    if spec.base_model != base.identity:
        raise PolicyRefused(
            "foreign_base",
            f"{what} was trained on base model {spec.base_model}, this server serves {base.identity}; give trainer and "
            "server the same model",
        )
    if spec.quantization != base.quantization:
        raise PolicyRefused(
            "foreign_base",
            f"{what} was trained on the base as {spec.quantization or 'it is'}, this server serves it as "
            f"{base.quantization or 'it is'}; start it with base_quantization: {spec.quantization or 'null'}",
        )
    if spec.kind not in base.kinds:
        mend = f"start it with enable_lora: {str(spec.kind == 'adapter').lower()}"
        raise PolicyRefused("kind", f"{what} is of kind {spec.kind}, this server serves {base.kinds}; {mend}")
    if spec.norm_noise and not base.noisy_norms:
        mend = "start this server with norm_noise: true"
        raise PolicyRefused("norm_noise", f"{what} belongs to a run with noise on the norm weights; {mend}")
    if base.max_rank is not None and spec.rank > base.max_rank:
        mend = f"start it with max_lora_rank: {spec.rank}"
        raise PolicyRefused("rank", f"{what} has rank {spec.rank}, this server takes {base.max_rank} at most; {mend}")


def _canary(manifest: PolicyManifest, files: Mapping[str, bytes], folder: str, base: BaseModel) -> Canary:
    data = _file(manifest, files, f"{folder}{CANARY_FILE}")
    try:
        canary = Canary.from_json(data)
    except ValueError as error:
        raise PolicyRefused("corrupt", str(error)) from error
    ids = canary.token_ids
    if canary.version != manifest.version:
        raise PolicyRefused("corrupt", f"the canary is of version {canary.version}, not {manifest.version}")
    if min(ids) < 0 or max(ids) >= base.vocab_size:
        expected = f"0 to {base.vocab_size - 1}"
        raise PolicyRefused("corrupt", f"the canary has ids from {min(ids)} to {max(ids)}, not from {expected}")
    return canary.cut(base.max_model_len - 1)


def _file(manifest: PolicyManifest, files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise PolicyRefused("partial", f"version {manifest.version} has no {name}")
    return files[name]


def _check_names(found: Collection[str], expected: Collection[str], what: str) -> None:
    if missing := sorted(set(expected) - set(found)):
        raise PolicyRefused("partial", f"{what} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}")
    if surplus := sorted(set(found) - set(expected)):
        raise PolicyRefused("shape", f"{what} has {len(surplus)} tensors that do not belong there, first {surplus[0]}")


def _check_shape(name: str, found: Iterable[int], expected: Iterable[int], reason: str = "shape") -> None:
    if tuple(found) != tuple(expected):
        raise PolicyRefused(reason, f"{name} has shape {list(found)}, expected {list(expected)}")


def _check_tensor(
    name: str, tensor: torch.Tensor, shape: Iterable[int], dtype: torch.dtype, reason: str = "shape"
) -> None:
    """Checks shape (for this reason of refusal) and values, as the server will hold them."""
    _check_shape(name, tensor.shape, shape, reason)
    if not tensor.is_floating_point():
        raise PolicyRefused("corrupt", f"{name} has type {tensor.dtype}, expected a floating-point type")
    if num_bad := int((~torch.isfinite(tensor.to(dtype))).sum()):
        raise PolicyRefused("not_finite", f"{name} has {num_bad} values that are not finite as {dtype}")


def _tensors(data: bytes, name: str) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except Exception as error:  # the library raises its own error and, by the damage, several of Python's
        raise PolicyRefused("corrupt", f"{name} is not a safetensors file: {error}") from error
    return tensors


def _check_adapter(manifest: PolicyManifest, files: Mapping[str, bytes], base: BaseModel, folder: str) -> None:
    spec = manifest.spec
    _check_config(_file(manifest, files, f"{folder}{ADAPTER_CONFIG_FILE}"), spec)
    tensors = _tensors(_file(manifest, files, f"{folder}{ADAPTER_FILE}"), ADAPTER_FILE)
    modules = _targets(spec, base)
    if unknown := sorted(set(spec.target_modules) - {module.rpartition(".")[2] for module in modules}):
        raise PolicyRefused("shape", f"target_modules {', '.join(unknown)} do not exist in the base model")
    names = {module: [f"{PEFT_PREFIX}{module}.lora_{part}.weight" for part in "AB"] for module in modules}
    _check_names(tensors, [name for both in names.values() for name in both], "the adapter")
    for module, (num_outputs, num_inputs) in modules.items():
        a, b = (tensors[name] for name in names[module])
        other_rank = a.shape[1:] == (num_inputs,) and a.shape[0] != spec.rank
        shapes = ((spec.rank, num_inputs), (num_outputs, spec.rank))
        for name, tensor, shape in zip(names[module], (a, b), shapes, strict=True):
            _check_tensor(name, tensor, shape, base.dtype, "rank" if other_rank else "shape")
        update = spec.alpha / spec.rank * float(a.double().norm() * b.double().norm())
        if not update <= LARGEST_UPDATE:
            what = f"{names[module][1]} and its A multiply to {update:.3g}"
            raise PolicyRefused("not_finite", f"{what}, above {LARGEST_UPDATE:g}: it would overflow")


def _check_config(data: bytes, spec: PolicySpec) -> None:
    """Checks that PEFT's configuration, from which vLLM takes rank and scaling, says what the manifest says and no
    more."""
    try:
        found = read_adapter_config(data)
    except CorruptError as error:
        raise PolicyRefused("corrupt", str(error)) from error
    expected = AdapterConfig(rank=spec.rank, alpha=spec.alpha, target_modules=tuple(sorted(spec.target_modules)))
    if found != expected:
        reason = "corrupt" if found.rank == expected.rank else "rank"
        raise PolicyRefused(reason, f"{ADAPTER_CONFIG_FILE} has {found}, the manifest says {expected}")


def _targets(spec: PolicySpec, base: BaseModel) -> dict[str, tuple[int, ...]]:
    """The layers of the base model that have an adapter, and the shapes (O, I) of their weights."""
    layers = {name.removesuffix(".weight"): shape for name, shape in base.shapes.items() if name.endswith(".weight")}
    return {
        module: shape
        for module, shape in layers.items()
        if len(shape) == 2 and module.rpartition(".")[2] in spec.target_modules
    }


def _check_weights(manifest: PolicyManifest, folder: Path, files: Mapping[str, bytes], base: BaseModel) -> None:
    """Checks merged or full weights; where they will be broadcast, their names and shapes only."""
    spec, expected = manifest.spec, set(base.shapes)
    if spec.kind == "merged":
        expected = {f"{module}.weight" for module in _targets(spec, base)}
        if spec.dtype == "float32" and base.dtype != torch.float32:
            raise PolicyRefused(
                "rounding",
                f"merged weights of a trainer in float32 would be rounded to {base.dtype}, which loses most of a small "
                "update; start this server with dtype: float32",
            )
    try:
        if ANNOUNCEMENT_FILE in files:
            announced = Announcement.from_json(files[ANNOUNCEMENT_FILE])
            _check_names(announced.names, expected, "the announcement")
            for name, shape in zip(announced.names, announced.shapes, strict=True):
                _check_shape(name, shape, base.shapes[name])
            return
        shard_of = weight_map(_file(manifest, files, INDEX_FILE), manifest.files)
        _check_names(shard_of, expected, "the version")
        for file in sorted(set(shard_of.values())):
            with safe_open(folder / file, framework="pt") as shard:
                if set(shard.keys()) != {name for name, own in shard_of.items() if own == file}:
                    raise PolicyRefused("corrupt", f"{file} holds other tensors than {INDEX_FILE} says")
                for name in sorted(shard.keys()):
                    _check_tensor(name, shard.get_tensor(name), base.shapes[name], base.dtype)
    except (CorruptError, SafetensorError, OSError) as error:
        raise PolicyRefused("corrupt", f"the weights of version {manifest.version}: {error}") from error


def _check_noise(manifest: PolicyManifest, files: Mapping[str, bytes], canaries: list[Canary], base: BaseModel) -> None:
    """Checks that a version has noise with its proof, and finite weights for just the norms that can carry it, or
    neither."""
    has_proof = canaries[0].noisy_logprobs is not None
    if has_proof != (NOISE_FILE in files):
        raise PolicyRefused("partial", f"version {manifest.version} has {NOISE_FILE} without its proof, or only that")
    if not has_proof:
        return
    if not manifest.spec.norm_noise or len(canaries) > 1:
        raise PolicyRefused("corrupt", f"{NOISE_FILE} is for a spec with norm_noise: true and one adapter")
    tensors = _tensors(files[NOISE_FILE], NOISE_FILE)
    _check_names(tensors, base.noisy_norms, NOISE_FILE)
    for name, size in base.noisy_norms.items():
        _check_tensor(name, tensors[name], (size,), torch.float32)
