"""The machine and the model, as far as they are known before a program is started: GPUs, memory, lengths.

Neither torch nor the network is asked. Defaults follow from these facts (`configs/defaults.py`).
"""

import functools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ATTENDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers of which a server keeps keys and values, by `layer_types`."""
_STRETCHED = ("yarn", "linear", "dynamic")
"""Kinds of rope scaling that let a model read more tokens than `max_position_embeddings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Where programs are to run."""

    gpus: tuple[str, ...] = ()
    """GPUs that a program would see, as indices or UUIDs."""
    gpu_bytes: int | None = None
    """Memory of the smallest of them (None: unknown)."""
    main_bytes: int | None = None
    """Main memory (None: unknown)."""

    def on_gpu(self, device: object) -> bool:
        """Returns whether a program with this `device` computes on a GPU here."""
        return device == "cuda" or (device != "cpu" and bool(self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's folder says without its weights being read."""

    positions: int | None
    """Tokens of the longest sequence that it is made for and the trainer computes as a server does (None: not said
    plainly)."""
    num_values: int
    """Number of its weights."""
    cache_values: int
    """Keys and values of one token in a server's cache."""
    only_attends: bool
    """Whether nothing else of a sequence is in a server's cache, such as states of Mamba or a convolution."""


def visible_gpus(environment: Mapping[str, str], folder: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that a program would see, as indices or UUIDs; looks without loading torch. As CUDA does, it reads the
    environment's list up to the first entry that is none; indices are compared with the devices in `folder`, where
    these show."""
    if not (folder / "nvidiactl").exists():
        return ()
    num_shown, listed = len([*folder.glob("nvidia[0-9]*")]), environment.get(VARIABLE)
    if listed is None:
        return tuple(map(str, range(max(1, num_shown))))
    return tuple(takewhile(lambda name: not (name.isdecimal() and 0 < num_shown <= int(name)), _listed(listed)))


def _listed(names: str) -> tuple[str, ...]:
    return tuple(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in names.split(","))))


def this_hardware() -> Hardware:
    """Returns what is known of the machine that this process runs on."""
    gpus = visible_gpus(os.environ)
    main_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(gpus=gpus, gpu_bytes=_gpu_bytes() if gpus else None, main_bytes=main_bytes)


def planned_hardware() -> Hardware:
    """Returns the machine of a dry run: this one or, where it has no GPU, one with the GPUs that CUDA_VISIBLE_DEVICES
    names, so that a run can be planned away from its machine."""
    here = this_hardware()
    named = _listed(os.environ.get(VARIABLE, ""))
    return here if here.gpus or not named else Hardware(gpus=named)


@functools.cache
def _gpu_bytes() -> int | None:
    """Returns the memory of the smallest GPU by nvidia-smi; None where that cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def model_facts(name: object) -> ModelFacts | None:
    """Returns what is known of a model: a folder's, or of a hub id what the local cache holds; None for nothing."""
    folder = _folder_of(name) if isinstance(name, str) else None
    try:
        config = json.loads((folder / "config.json").read_bytes()) if folder is not None else None
        return None if folder is None or config is None else _facts(config.get("text_config", config), folder)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None  # the programs say what is wrong with it


def _folder_of(name: str) -> Path | None:
    if Path(name).is_dir() or name.count("/") != 1 or name.startswith((".", "/")):
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _facts(config: Mapping[str, Any], folder: Path) -> ModelFacts:
    def number(*keys: str) -> int:
        return int(str(next((config[key] for key in keys if config.get(key) is not None), None)))

    heads = number("num_attention_heads")
    head_dim = number("head_dim") if config.get("head_dim") else number("hidden_size") // heads
    # A folder may have the same weights twice: those that are loaded are called model.
    num_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    is_wide = str(config.get("dtype") or config.get("torch_dtype")).endswith("float32")
    return ModelFacts(
        positions=_positions(config),
        num_values=num_bytes // (4 if is_wide else 2),
        cache_values=2 * number("num_hidden_layers") * number("num_key_value_heads", "num_attention_heads") * head_dim,
        only_attends=all(kind in _ATTENDS for kind in config.get("layer_types") or ())
        and not any(name in key for key in config for name in ("mamba", "ssm", "conv_", "linear_attn")),
    )


def _positions(config: Mapping[str, Any]) -> int | None:
    """Returns the tokens of the longest sequence: within an attention window, and below the length from which longrope
    takes other factors, since the trainer refuses longer ones."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind, positions = rope.get("rope_type", rope.get("type")), config.get("max_position_embeddings")
    if kind == "longrope":
        positions = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    elif kind in _STRETCHED:
        positions = None
    layers = config.get("layer_types")
    slides = config.get("use_sliding_window", True) if layers is None else "sliding_attention" in layers
    return min((n for n in (positions, slides and config.get("sliding_window")) if n), default=None)
