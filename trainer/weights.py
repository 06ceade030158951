"""Holds the weights that a policy version consists of: an adapter or several with their files, or all weights.

Snapshots are whole even if the weights are sharded: all ranks must take them together, and rank 0 gets them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from grpo.trainer.distributed import Ranks, host_copies, local_tensor, shard_like
from grpo.trainer.errors import ModelError
from grpo.trainer.lora import FusedLoraLinear, Segment, add_adapter, by_segment
from grpo.transport.weights.shards import Weight
from grpo.transport.weights.store import ADAPTER_CONFIG_FILE, ADAPTER_FILE, read_adapter_config
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

Snapshot = Mapping[str, torch.Tensor]
"""Weights in main memory, a copy that the next step leaves alone. Adapters are in float32, named by their folder and
PEFT's names; all weights are in the type of computation, named as in the model. Empty on other ranks than 0."""
Made = tuple[dict[str, bytes], list[Weight]]
"""A version's files and weights."""
_PEFT_PREFIX = "base_model.model."


class AdapterWeights:
    """An adapter on a frozen base, or several of the same shapes."""

    def __init__(self, model: PeftModel, *, folders: Mapping[str, str], name: str, ranks: Ranks) -> None:
        """Takes `folders`, which maps the beginning of each adapter's file names to PEFT's name for it, in the
        adapters' order, and the base's `name` in their configuration."""
        self._model, self._folders, self._name, self._ranks = model, dict(folders), name, ranks
        self._parameters = {folder: _parameters_of(model, adapter) for folder, adapter in folders.items()}

    @cached_property
    def _layers(self) -> Sequence[FusedLoraLinear]:
        """The layers that have adapters, which no further adapter changes."""
        return list(_adapted(self._model).values())

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Names of the linear layers that have an adapter, sorted."""
        names = {name for folder in self._parameters.values() for name in folder}
        return tuple(sorted({name.removesuffix(".weight").rpartition(".")[0].rpartition(".")[2] for name in names}))

    def beside(self, name: str, *, rank: int, alpha: int, targets: Sequence[str], seed: int) -> "AdapterWeights":
        """Adds one more adapter to the same model, called `name` in PEFT, on those of its adapted layers whose names
        are in `targets`. A is random from the seed, B zero. It is computed with once it is in `use`."""
        add_adapter(self._model, name, rank=rank, alpha=alpha, targets=targets, seed=seed)
        return AdapterWeights(self._model, folders={"": name}, name=self._name, ranks=self._ranks)

    def use(self) -> None:
        """Makes these adapters those that the model computes with and that get gradients."""
        self._model.base_model.set_adapter(list(self._folders.values()))

    def in_segments(self, segments: Sequence[tuple["AdapterWeights", int]]) -> AbstractContextManager[None]:
        """Divides passes within the block into runs of so many tokens, each with the adapter of weights that are
        `beside` these. They must be computed with by nobody else."""
        named = [Segment(next(iter(weights._folders.values())), size) for weights, size in segments]
        return by_segment(self._layers, named)

    def remove(self) -> None:
        """Takes these adapters from the model. Others must be in use."""
        for name in self._folders.values():
            self._model.delete_adapter(name)

    def named_parameters(self, adapter: int = 0) -> dict[str, torch.nn.Parameter]:
        """Returns the trained parameters of this adapter by their names in PEFT's files."""
        return dict(list(self._parameters.values())[adapter])

    def disabled(self) -> AbstractContextManager[None]:
        """Makes the model the base within the block."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context

    def is_base(self, snapshot: Snapshot, *, version: int, adapter: int = 0) -> bool:
        """Returns whether this adapter changes nothing in the snapshot, because every B is zero."""
        folder = list(self._folders)[adapter]
        names = [f"{folder}{name}" for name in self._parameters[folder] if "lora_B" in name]
        return not any(bool(snapshot[name].any()) for name in names)

    def parameters(self, adapter: int) -> list[torch.nn.Parameter]:
        """Returns the trained parameters of this adapter."""
        return list(self.named_parameters(adapter).values())

    def snapshot(self) -> Snapshot:
        """Returns the adapters as they are now."""
        named = {f"{folder}{name}": p for folder, own in self._parameters.items() for name, p in own.items()}
        return host_copies(named, self._ranks, dtype=torch.float32)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Replaces the first adapter by the one in PEFT's format in `folder`. Raises `ModelError` if that is none,
        another model's, or has other sizes."""
        for parameter, tensor in self._read(folder, "").items():
            local_tensor(parameter).copy_(local_tensor(tensor))

    def read(self, folder: Path) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Returns all adapters of the version in `folder` by the parameters that hold them, sharded as those are.
        Raises `ModelError` where it has not these adapters."""
        return {p: tensor for below in self._folders for p, tensor in self._read(folder, below).items()}

    def _read(self, folder: Path, below: str) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Returns one adapter of those in `folder`, whose files are `below`."""
        try:
            config = read_adapter_config((folder / f"{below}{ADAPTER_CONFIG_FILE}").read_bytes())
            given = load_file(folder / f"{below}{ADAPTER_FILE}")
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"init_adapter: {folder} holds no plain adapter that PEFT has written: {error}") from error
        name, named = self._folders[below], self._parameters[below]
        own, shapes = self._model.peft_config[name], {key: tuple(p.shape) for key, p in named.items()}
        if shapes != {key: tuple(tensor.shape) for key, tensor in given.items()} or config.alpha != own.lora_alpha:
            raise ModelError(
                f"init_adapter: {folder} has rank {config.rank}, alpha {config.alpha} and target modules "
                f"{list(config.target_modules)}, or is another model's; expected {own.r}, "
                f"{own.lora_alpha} and {sorted(own.target_modules)}: set lora_rank, lora_alpha and lora_target_modules"
            )
        return {parameter: shard_like(given[key].float(), parameter) for key, parameter in named.items()}

    def make(self, snapshot: Snapshot, *, merged: bool) -> Made:
        """Returns the adapters' files, or the base's matrices with the adapter merged into them."""
        return ({}, self.merged(snapshot)) if merged else (self.files(snapshot), [])

    def files(self, snapshot: Snapshot) -> dict[str, bytes]:
        """Returns the adapters in PEFT's format, float32: name → bytes. Others than the first are in folders, as
        `grpo.transport.records.adapter_folders` says."""
        files: dict[str, bytes] = {}
        for folder, named in self._parameters.items():
            tensors = {name: snapshot[f"{folder}{name}"] for name in named}
            files[f"{folder}{ADAPTER_FILE}"] = save(tensors, metadata={"format": "pt"})
            files[f"{folder}{ADAPTER_CONFIG_FILE}"] = self._config(self._folders[folder])
        return files

    def _config(self, adapter: str) -> bytes:
        config = self._model.peft_config[adapter].to_dict()
        config |= {"inference_mode": True, "base_model_name_or_path": self._name}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        return json.dumps(plain, indent=1, sort_keys=True).encode()

    def merged(self, snapshot: Snapshot) -> list[Weight]:
        """Returns the base's matrices that the adapter changes, with it merged into them, in the base's type. Each is
        computed when it is read, which may be beside a training step, because the base does not change. Only with one
        adapter.
        """
        assert len(self._folders) == 1, "a base cannot have several adapters merged into it"
        return [_merged(name, layer, snapshot) for name, layer in _adapted(self._model).items()]


def peft_names(num_adapters: int) -> tuple[str, ...]:
    """Returns PEFT's names for the adapters. They are parts of the parameters' names, which stay the same in each start
    of a run; users' own names might not be valid there."""
    return ("default", *(f"adapter_{index}" for index in range(1, num_adapters)))


def _adapted(model: PeftModel) -> dict[str, FusedLoraLinear]:
    """Returns the layers that have adapters, by the base's names."""
    return {n: m for n, m in model.get_base_model().named_modules() if isinstance(m, FusedLoraLinear)}


def _parameters_of(model: PeftModel, adapter: str) -> dict[str, torch.nn.Parameter]:
    """Returns an adapter's A and B of every layer, by their names in PEFT's files."""
    return {
        f"{_PEFT_PREFIX}{name}.{part}.weight": getattr(layer, part)[adapter].weight
        for name, layer in _adapted(model).items()
        for part in ("lora_A", "lora_B")
        if adapter in getattr(layer, part)
    }


class FullWeights:
    """All weights of a model, which are trained in float32."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        published: Mapping[str, str],
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        """Takes `published`, which maps the checkpoint's names to parameters' names; `dtype` is the type of
        computation."""
        self._parameters, self._published = parameters, published
        self._dtype, self._ranks = dtype, ranks

    target_modules: tuple[str, ...] = ()
    """Empty, since no layer has an adapter."""

    def disabled(self) -> AbstractContextManager[None]:
        """Does nothing: the model is the base until its first step, and afterwards the base is gone."""
        return nullcontext()

    def is_base(self, snapshot: Snapshot, *, version: int, adapter: int = 0) -> bool:
        """Returns whether no step was made."""
        return version == 0

    def snapshot(self) -> Snapshot:
        """Returns all weights as they are now, in the type of computation."""
        return host_copies(self._parameters, self._ranks, dtype=self._dtype)

    def make(self, snapshot: Snapshot, *, merged: bool) -> Made:
        """Returns all weights by the checkpoint's names."""
        return {}, [self._weight(name, snapshot[parameter]) for name, parameter in self._published.items()]

    def _weight(self, name: str, tensor: torch.Tensor) -> Weight:
        return Weight(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            tensor=lambda: tensor,
        )


def published_names(folder: Path, model: torch.nn.Module) -> dict[str, str]:
    """Maps each name in the checkpoint in `folder` to that of `model`'s parameter: servers want all of the checkpoint's
    names and no others. Tied weights, which a checkpoint may have under either name or both, are one parameter.

    Raises `ModelError` if the model has no parameter for a name, or one that is not in the checkpoint.
    """
    first: dict[torch.nn.Parameter, str] = {}
    parameters = {n: first.setdefault(p, n) for n, p in model.named_parameters(remove_duplicate=False)}
    stored = [name for file in sorted(folder.glob("*.safetensors")) for name in _names_in(file)]
    surplus, missing = sorted(set(stored) - parameters.keys()), set(first.values())
    published = {name: parameters[name] for name in stored if name in parameters}
    missing -= set(published.values())
    if surplus or missing:
        raise ModelError(
            f"lora: false publishes the weights by the names in {folder}, and the model has no parameter for "
            f"{surplus[:3] or 'none'} of them and has {sorted(missing)[:3] or 'none'} besides; convert the checkpoint "
            "by loading and saving it with transformers, in safetensors"
        )
    return published


def _names_in(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def _merged(name: str, layer: FusedLoraLinear, snapshot: Snapshot) -> Weight:
    """Returns W + s B A, summed in float32."""
    base: torch.Tensor = layer.get_base_layer().weight
    a, b = (snapshot[f"{_PEFT_PREFIX}{name}.lora_{part}.weight"] for part in "AB")

    def tensor() -> torch.Tensor:
        factors = b.to(base.device), a.to(base.device)
        return torch.addmm(base.detach().float(), *factors, alpha=layer.scaling["default"]).to(base.dtype)

    return Weight(
        name=f"{name}.weight",
        dtype=str(base.dtype).removeprefix("torch."),
        shape=tuple(base.shape),
        tensor=tensor,
    )
