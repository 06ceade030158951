"""What two real ranks need in memory to load sharded weights, and to copy them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.trainer import distributed
from grpo.trainer.distributed import host_copies, join_group, leave_group
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Shard

from tests.trainer.forked import run_ranks
from tests.trainer.models import CPU, save_tiny_model, tiny_policy

MIB = 1 << 20
ROWS = (4095, 1, 4096, 3, 4096)
"""Rows of 4 KiB in float32: 48 MiB in all, some of which do not divide by two."""
GATHERED = 4 * MIB


def peak_mib(begin: bool) -> float:
    """Begins to measure the largest resident set anew, or returns it, in MiB."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def copying(folder: Path, variables: dict[str, str]) -> None:
    """Writes what each rank's copies are, and how much memory they took beside what was there."""
    os.environ.update(variables)
    ranks = join_group(CPU, timeout_s=120)
    distributed.GATHERED_BYTES = GATHERED
    mesh = init_device_mesh("cpu", (ranks.size,))
    torch.manual_seed(0)
    whole = {f"w{index}": torch.randn(rows, 1024) for index, rows in enumerate(ROWS)}
    expected = {name: float(tensor.double().sum()) for name, tensor in whole.items()}
    sharded = {n: distribute_tensor(t, mesh, (Shard(0),), src_data_rank=None).clone() for n, t in whole.items()}
    del whole
    host_copies({"warm": sharded["w1"]}, ranks)
    result: dict[str, Any] = {"bytes": [part.decode() for part in ranks.gather(b"ab" * (1 + ranks.rank) * GATHERED)]}
    result["bytes"] = [len(part) / GATHERED for part in result["bytes"]]
    before = peak_mib(begin=True)
    copies = host_copies(sharded, ranks)
    result["peak_mib"] = peak_mib(begin=False) - before
    result["right"] = {n: float(t.double().sum()) for n, t in copies.items()} == (expected if ranks.is_main else {})
    low = host_copies(sharded, ranks, dtype=torch.bfloat16)
    result["low"] = all(torch.equal(low[name], tensor.bfloat16()) for name, tensor in copies.items())
    (folder / f"{ranks.rank}.json").write_text(json.dumps(result))
    leave_group()


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("copied")
    run_ranks(copying, folder, num_ranks=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_the_main_rank_has_the_whole_tensors_in_any_type_and_the_other_none(copied: list[dict[str, Any]]) -> None:
    assert [one["right"] and one["low"] for one in copied] == [True, True]
    assert [one["bytes"] for one in copied] == [[2, 4], []]


def test_a_copy_takes_a_slice_beside_itself_and_less_on_a_rank_that_keeps_nothing(copied: list[dict[str, Any]]) -> None:
    first, second = (one["peak_mib"] for one in copied)
    # 48 MiB and the slices of both ranks; the other rank sends its own, which are half of that
    assert first < 48 + 3 * GATHERED / MIB
    assert second < GATHERED / MIB


def loading(model: Path, tiny: Path, folder: Path, variables: dict[str, str]) -> None:
    """Writes how much memory each rank took to load its shards, after it has loaded `tiny` to warm up."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    ranks = join_group(CPU, timeout_s=120)
    tiny_policy(tiny, ranks=ranks, moved=False, lora=False)
    results = {}
    for name, options in SHARDED.items():
        before = peak_mib(begin=True)
        policy = tiny_policy(model, ranks=ranks, moved=False, **options)
        results[name] = peak_mib(begin=False) - before
        del policy
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))
    leave_group()


SHARDED: dict[str, dict[str, Any]] = {
    "an adapter": {"zero_level": 3},
    "all weights": {"lora": False, "zero_level": 1},
}


def test_each_rank_reads_its_own_rows_of_a_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    model = save_tiny_model(tmp_path / "model", vocab_size=1 << 20, tie_word_embeddings=True)
    file = model / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    run_ranks(loading, model, tiny_model, tmp_path, num_ranks=2)
    size_mib = file.stat().st_size / MIB
    for rank in (0, 1):
        peaks = json.loads((tmp_path / f"{rank}.json").read_text())
        # of the file, mapped, and of a copy, half; and half of the weights in float32
        assert max(peaks.values()) < (0.5 + 0.5 + 2 * 0.5 + 0.2) * size_mib, (size_mib, peaks)
