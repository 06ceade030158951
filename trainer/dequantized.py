"""The values of a quantized base for servers, and for the trainer itself where it computes on theirs (`colocate`)."""

import logging
from pathlib import Path

import torch

from trainer.loading import dequantized_weights
from trainer.quantization import check_setting, stored_in
from transport.records import Quantization
from transport.run import RunFolder
from transport.weights.dequantized import write_dequantized
from transport.weights.shards import checkpoint_files

log = logging.getLogger(__name__)


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
    files = checkpoint_files(folder, dtype=name)
    written = write_dequantized(
        run, base_model=base_model, quantization=quantization, dtype=name, files=files, weights=weights
    )
    log.info("the base's values in %s are in %s, for servers to have the same", quantization, written)
