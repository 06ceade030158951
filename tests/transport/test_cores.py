"""The cores of a process: their number, their division, and what numeric libraries are told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from grpo.transport.cores import COMPILED_VAR, available_cores, compiled_folder, set_allocator, threads_each

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 1), (4, 2), (5, 2), (16, 7), (128, 8)])
def test_server_and_trainer_get_as_much_each_and_from_five_cores_one_is_left(cores: int, threads: int) -> None:
    assert threads_each(cores, 2) == threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (6, 1), (7, 2), (128, 8)])
def test_the_server_of_a_teacher_gets_as_much_as_the_other_two(cores: int, threads: int) -> None:
    assert threads_each(cores, 3) == threads


@pytest.mark.parametrize(
    ("own", "files", "most"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),  # a container's, which sees its own at the root
        ("0::/job/step\n", {"job/cpu.max": "100000 100000\n", "job/step/cpu.max": "max 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),  # half a core
        ("0::/\n", {"cpu.max": "max 100000\n"}, ALL),
        ("0::/\n", {"cpu.max": "garbage"}, ALL),
        ("4:cpu,cpuacct:/docker/x\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, ALL),
        ("4:memory:/\n", {}, ALL),
    ],
)
def test_quotas_of_either_version_limit_the_cores(tmp_path: Path, own: str, files: dict[str, str], most: int) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert available_cores(tmp_path / "fs", tmp_path / "own") == most
    assert available_cores(tmp_path / "absent", tmp_path / "absent") == ALL


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "mine"}, {"PYTORCH_CUDA_ALLOC_CONF": "mine"}])
def test_torchs_memory_grows_in_place_unless_a_person_has_said_how(given: dict[str, str]) -> None:
    environment = dict(given)
    set_allocator(environment)
    assert environment == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


PRODUCTS = """
from grpo.transport.cores import set_numeric_defaults
set_numeric_defaults()
import gc, torch
from pathlib import Path
from grpo.trainer.matmul import linear
from grpo.trainer.memory import keep_freed_memory
def anonymous_mb():
    [line] = [one for one in Path("/proc/self/smaps_rollup").read_text().splitlines() if one.startswith("Anonymous")]
    return int(line.split()[1]) / 1024
keep_freed_memory()
torch.set_num_threads(1)
weights = [torch.ones(192, 128), torch.ones(128, 192)]
linear(torch.ones(700, 128), weights[0])
before = anonymous_mb()
for rows in range(100, 250):
    for weight in weights:
        linear(torch.ones(rows, weight.shape[1]), weight)
print(anonymous_mb() - before)
"""


def test_kernels_of_products_with_ever_new_numbers_of_rows_do_not_fill_the_memory() -> None:
    limits = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in limits}
    done = subprocess.run([sys.executable, "-c", PRODUCTS], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 150


def test_a_user_whose_number_has_no_name_has_a_folder_for_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", COMPILED_VAR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert Path(compiled_folder()).name == "torchinductor_987654"
