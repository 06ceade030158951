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

from transport.shared_base.lending import borrow, offered

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def lender_of(output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """The child of `lender.py`, ready."""
    command, pipe = [sys.executable, "-m", "tests.gpu.lender", str(output_dir)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as lender:
        try:
            assert lender.stdout
            assert lender.stdout.readline() == "ready\n"
            yield lender
        finally:
            lender.kill()


def test_a_borrower_sees_the_lenders_memory_itself_again_and_again(gpu: torch.device, tmp_path: Path) -> None:
    with lender_of(tmp_path) as lender:
        assert lender.stdin
        assert lender.stdout
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


def test_a_killed_lender_is_noticed_and_the_next_one_lends_in_its_place(gpu: torch.device, tmp_path: Path) -> None:
    with lender_of(tmp_path) as lender:
        borrowed = borrow(tmp_path, gpu, timeout_s=30)
        assert borrowed.lender.answers()
        lender.kill()
        assert not borrowed.lender.answers()
        lender.wait()
    assert borrowed.lender.is_broken()
    assert offered(tmp_path, gpu) is None
    del borrowed  # unmapped without its lender
    torch.cuda.synchronize(gpu)
    with lender_of(tmp_path):
        again = offered(tmp_path, gpu)
        assert again is not None
        assert torch.equal(again.tensors["a"], torch.arange(8.0, device=gpu).view(4, 2))
        assert not again.lender.is_broken()


def test_a_layers_weights_are_borrowed_anew_in_place(gpu: torch.device, tmp_path: Path) -> None:
    """A frozen parameter takes the next lender's memory, and products with it follow."""
    layer = torch.nn.Linear(2, 4, bias=False, device="meta")
    for number in range(2):
        with lender_of(tmp_path):
            borrowed = borrow(tmp_path, gpu, timeout_s=30)
            if number == 0:
                layer.weight = torch.nn.Parameter(borrowed.tensors["a"], requires_grad=False)
            else:
                layer.weight.data = borrowed.tensors["a"]
            expected = torch.arange(8.0, device=gpu).view(4, 2).sum(1)
            assert torch.equal(layer(torch.ones(2, device=gpu)), expected)
            assert not borrowed.lender.is_broken()
