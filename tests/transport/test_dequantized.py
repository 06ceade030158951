"""The values of a quantized base beside a run: whole, of the base and format that are asked for, or waited for."""

from pathlib import Path

import pytest
import torch
from grpo.transport.errors import DeadlineError
from grpo.transport.run import RunFolder
from grpo.transport.weights.dequantized import FOLDER, wait_for_dequantized, write_dequantized
from grpo.transport.weights.shards import Weight


def write(path: Path, value: float, *, dtype: str = "float32") -> Path:
    weight = Weight(name="a.weight", dtype=dtype, shape=(2, 3), tensor=lambda: torch.full((2, 3), value))
    run = RunFolder(path=path, run_id="5f0c")
    files = {"config.json": b"{}"}
    return write_dequantized(run, base_model="9f", quantization="nf4", dtype=dtype, files=files, weights=[weight])


def test_it_is_written_once_and_anew_in_another_type(tmp_path: Path) -> None:
    folder = write(tmp_path, 1.0)
    assert (
        folder == wait_for_dequantized(tmp_path, base_model="9f", quantization="nf4", timeout_s=1) == tmp_path / FOLDER
    )
    first = (folder / "STABLE").read_bytes()
    write(tmp_path, 2.0)
    assert (folder / "STABLE").read_bytes() == first, "the same base and format have the same values"
    write(tmp_path, 2.0, dtype="bfloat16")
    assert (folder / "STABLE").read_bytes() != first


@pytest.mark.parametrize("spoil", ["nothing", "another base", "another format", "a torn file"])
def test_what_is_not_there_whole_is_waited_for(tmp_path: Path, spoil: str) -> None:
    if spoil != "nothing":
        folder = write(tmp_path, 1.0)
    if spoil == "a torn file":
        shard = next(folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])
    base, format = "8e" if spoil == "another base" else "9f", "fp8" if spoil == "another format" else "nf4"
    with pytest.raises(DeadlineError, match="grpo-train"):
        wait_for_dequantized(tmp_path, base_model=base, quantization=format, timeout_s=0.1)  # type: ignore[arg-type]
