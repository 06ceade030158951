"""A GPU's memory that two processes map by CUDA IPC.

Not yet run: needs a GPU.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from grpo.transport.shared_base import import_base

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def exporter_of(output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """The child of `exporter.py`, ready."""
    command, pipe = [sys.executable, "-m", "tests.gpu.exporter", str(output_dir)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as exporter:
        try:
            assert exporter.stdout
            assert exporter.stdout.readline() == "ready\n"
            yield exporter
        finally:
            exporter.kill()


def test_an_importer_sees_the_exporters_memory_itself_again_and_again(gpu: torch.device, tmp_path: Path) -> None:
    with exporter_of(tmp_path) as exporter:
        assert exporter.stdin
        assert exporter.stdout
        for round in range(2):
            base = import_base(tmp_path, gpu, timeout_s=30)
            expected = torch.arange(12.0, device=gpu).view(6, 2) + round
            assert torch.equal(base.tensors["a"], expected[:4])
            assert torch.equal(base.tensors["b"], expected[4:])
            for tensor in base.tensors.values():  # nothing on a GPU forbids it, and it shows that nothing is copied
                tensor += 1
            torch.cuda.synchronize(gpu)
            exporter.stdin.write("sum\n")
            exporter.stdin.flush()
            assert float(exporter.stdout.readline()) == float(expected.sum()) + 12
            del base, tensor


def test_a_killed_exporter_is_noticed_and_the_next_one_takes_its_place(gpu: torch.device, tmp_path: Path) -> None:
    with exporter_of(tmp_path) as exporter:
        base = import_base(tmp_path, gpu, timeout_s=30)
        assert base.exporter_lives
        exporter.kill()
        exporter.wait()
        assert not base.exporter_lives
    del base
    torch.cuda.synchronize(gpu)
    with exporter_of(tmp_path):
        again = import_base(tmp_path, gpu, timeout_s=30)
        assert torch.equal(again.tensors["a"], torch.arange(8.0, device=gpu).view(4, 2))
