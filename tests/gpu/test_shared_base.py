"""A GPU's memory that two processes map by CUDA IPC.

Not yet run: needs a GPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from transport.shared_base.lending import borrow

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def test_a_borrower_sees_the_lenders_memory_itself_again_and_again(gpu: torch.device, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.lender", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as lender:
        try:
            assert lender.stdin
            assert lender.stdout
            assert lender.stdout.readline() == "ready\n"
            for round in range(2):
                tensors = borrow(tmp_path, gpu, timeout_s=30).tensors
                expected = torch.arange(12.0, device=gpu).view(6, 2) + round
                assert torch.equal(tensors["a"], expected[:4])
                assert torch.equal(tensors["b"], expected[4:])
                for tensor in tensors.values():  # nothing on a GPU forbids it, and so it is seen that nothing is copied
                    tensor += 1
                torch.cuda.synchronize(gpu)
                lender.stdin.write("sum\n")
                lender.stdin.flush()
                assert float(lender.stdout.readline()) == float(expected.sum()) + 12
                del tensors, tensor
        finally:
            lender.kill()
