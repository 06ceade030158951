"""The values of a quantized base as a plain checkpoint, `RUN/dequantized/`: the trainer, which knows the format, writes
it once, and servers whose vLLM does not compute with the same format serve it, so that both have the same numbers."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo.transport.errors import CorruptError, DeadlineError, TransportError
from grpo.transport.folders import Content, check_file, read_manifest, write_folder
from grpo.transport.records import FileEntry, Manifest, Quantization
from grpo.transport.run import RunFolder
from grpo.transport.weights.shards import Weight, shard_files

FOLDER = "dequantized"
_LOOK_AGAIN_S = 0.2


class DequantizedManifest(Manifest, frozen=True, kw_only=True):
    """The manifest of the folder."""

    base_model: str
    """Identity of the checkpoint that was quantized."""
    quantization: Quantization
    dtype: str
    """Type that the values are rounded to, once; the trainer computes in it."""


def write_dequantized(
    run: RunFolder,
    *,
    base_model: str,
    quantization: Quantization,
    dtype: str,
    files: Mapping[str, Content],
    weights: Sequence[Weight],
) -> Path:
    """Writes the folder with these values, unless it is there already, whole, and returns it. `files` are the rest of
    a checkpoint, its config.json and tokenizer. Raises `StorageError`."""
    folder, about = run.path / FOLDER, {"base_model": base_model, "quantization": quantization, "dtype": dtype}
    if _is_there(folder, about):
        return folder

    def manifest(entries: dict[str, FileEntry]) -> bytes:
        return DequantizedManifest(
            run_id=run.run_id, base_model=base_model, quantization=quantization, dtype=dtype, files=entries
        ).to_json()

    write_folder(folder, {**files, **shard_files(weights)}, manifest, replace=True)
    return folder


def wait_for_dequantized(output_dir: Path, *, base_model: str, quantization: Quantization, timeout_s: float) -> Path:
    """Returns the folder once the trainer of the run in `output_dir` has written it. Raises `DeadlineError`."""
    folder, deadline_s = output_dir / FOLDER, time.monotonic() + timeout_s
    while not _is_there(folder, {"base_model": base_model, "quantization": quantization}):
        if time.monotonic() >= deadline_s:
            raise DeadlineError(
                f"waited {timeout_s:g} s for grpo-train to write the values of its {quantization} base to {folder}; "
                f"start it with output_dir: {output_dir}, the same model and the same qlora_* setting, or see its log"
            )
        time.sleep(_LOOK_AGAIN_S)
    return folder


def _is_there(folder: Path, about: Mapping[str, str]) -> bool:
    """Whether the folder is there, of this base and format, and whole."""
    try:
        manifest = DequantizedManifest.from_json(read_manifest(folder))
        if any(getattr(manifest, key) != value for key, value in about.items()):
            return False
        for name, entry in manifest.files.items():
            check_file(folder, name, entry)
    except (CorruptError, TransportError, OSError):
        return False
    return True
