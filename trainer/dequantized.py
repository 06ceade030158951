"""The values of a quantized base for servers, and for the trainer itself where it computes on theirs (`colocate`)."""

import json
import logging
from pathlib import Path

import torch

from trainer.loading import dequantized_weights
from trainer.quantization import check_setting, stored_in
from transport.folders import Content
from transport.records import Quantization
from transport.run import RunFolder
from transport.weights.dequantized import write_dequantized

log = logging.getLogger(__name__)

_LARGE = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_COPIED = ("config.json", "hf_quant_config.json")


def publish_dequantized(
    folder: Path,
    run: RunFolder,
    *,
    base_model: str,
    quantization: Quantization,
    dtype: torch.dtype,
    device: torch.device,
    colocate: bool,
) -> None:
    """Writes the checkpoint in `folder` as it is once it has been quantized, plain in `dtype`, beside the run, unless
    it is there, or servers on GPUs read the same format (not yet run on a GPU). `base_model` is its identity, `device`
    where it is quantized. Raises `ModelError` and `StorageError`."""
    stored = stored_in(folder)
    check_setting(folder, stored, quantization)
    if stored is not None and device.type == "cuda" and not colocate:
        return
    weights = dequantized_weights(folder, quantization, stored, dtype=dtype, device=device)
    name = str(dtype).removeprefix("torch.")
    files: dict[str, Content] = {"config.json": _plain_config(folder, name)}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in _NOT_COPIED and not path.name.endswith(_LARGE):
            files[path.name] = path.read_bytes()
    written = write_dequantized(
        run, base_model=base_model, quantization=quantization, dtype=name, files=files, weights=weights
    )
    log.info("the base's values in %s are in %s, for servers to have the same", quantization, written)


def _plain_config(folder: Path, dtype: str) -> bytes:
    config = json.loads((folder / "config.json").read_bytes())
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    return json.dumps(config, indent=1).encode()
