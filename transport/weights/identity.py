"""The identity of a base model: a digest that all programs compute alike, without loading weights."""

import contextlib
import hashlib
import json
import os
from functools import partial
from pathlib import Path

_SAMPLE_BYTES = 1 << 20
_SMALL_FILES = ("*.jinja", "*.json", "*.txt", "*.model", "*.tiktoken", "*.py")
# Keys that tools rewrite without changing the model.
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def resolve_model(name: str) -> Path:
    """Returns the folder of a base model: `name` itself where it is one, or a hub id's snapshot in the local cache.

    Raises `FileNotFoundError` with the places that were searched.
    """
    path = Path(name)
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise FileNotFoundError(f"model {name!r}: the folder has no config.json; give a model in Hugging Face format")
    if path.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise FileNotFoundError(f"model {name!r}: no such folder (looked for {path.absolute()})")
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return _snapshot(name, local_files_only=True)
        if os.environ.get("HF_HUB_OFFLINE") == "1":  # which the library reads only when it is imported
            raise OSError("HF_HUB_OFFLINE=1 forbids it")
        return _snapshot(name, local_files_only=False)
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise FileNotFoundError(
            f"model {name!r}: neither a folder here nor whole in the local Hugging Face cache, and it could not be "
            f"fetched from the hub: {next(iter(str(error).splitlines()), error)}"
        ) from error


def _snapshot(name: str, *, local_files_only: bool) -> Path:
    """Returns the folder of a hub id's snapshot with configuration, tokenizer, templates, and the weights that
    transformers would load; other files of the repository (other formats of the weights, copies in folders) are not
    fetched. Raises `LocalEntryNotFoundError` where one of them is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # Templates may be in a folder of their own; a pattern's star takes slashes too.
    copies = [f"*/{one}" for one in _SMALL_FILES[1:]]
    small = partial(snapshot_download, allow_patterns=list(_SMALL_FILES), ignore_patterns=copies)
    folder = Path(small(name, local_files_only=local_files_only))
    weights = weight_files(folder)
    # By the commit, so that all files are of the same one.
    snapshot_download(name, revision=folder.name, local_files_only=local_files_only, allow_patterns=weights)
    if missing := [file for file in ("config.json", *weights) if not (folder / file).is_file()]:
        raise LocalEntryNotFoundError(f"it has no {missing[0]}; the trainer needs a model in safetensors")
    return folder


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the weight files that transformers loads from a model's folder: the shards that its index
    lists, or the one file. The files need not be there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))


def base_identity(folder: Path) -> str:
    """Returns a digest of the model's configuration and of each weight file's name, size, first and last mebibyte."""
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_bytes())
    plain = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    digest.update(json.dumps(plain, sort_keys=True).encode())
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{folder} has no .safetensors weights; convert the model to safetensors")
    for path in weights:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, path.stat().st_size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]
