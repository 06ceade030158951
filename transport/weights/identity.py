"""The identity of a base model: a digest that all programs compute alike, without loading weights."""

import contextlib
import hashlib
import json
import os
from pathlib import Path

_SAMPLE_BYTES = 1 << 20
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, local_files_only=True))
        if os.environ.get("HF_HUB_OFFLINE") == "1":  # which the library reads only when it is imported
            raise OSError("HF_HUB_OFFLINE=1 forbids it")
        return Path(snapshot_download(name))
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise FileNotFoundError(
            f"model {name!r}: neither a folder here nor in the local Hugging Face cache, and it could not be fetched "
            f"from the hub: {error}"
        ) from error


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
