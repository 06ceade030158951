"""Processes that lend or borrow two tensors of a run's folder, for tests that kill them.

`python -m tests.transport.shared_base.child lend|borrow|write OUTPUT_DIR` prints `ready` and then lives on.
"""

import sys
from pathlib import Path

import torch

from transport.shared_base.base import CPU, Lender, Manifest
from transport.shared_base.lending import borrow, lend
from transport.shared_base.memory import SharedMemory, aligned

FUSED = torch.arange(12.0).view(6, 2)
HALF = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
TIMEOUT_S = 60.0


def lent_tensors() -> tuple[Manifest, SharedMemory, list[torch.Tensor]]:
    """`a` and `b`, rows 0 to 3 and 4 to 5 of one fused tensor, and `c` in 16 bits; and the lender's own tensors."""
    memory = SharedMemory(aligned(FUSED.nbytes) + aligned(HALF.nbytes))
    fused, half = memory.place(FUSED), memory.place(HALF)
    views = {"a": fused[:4], "b": fused[4:], "c": half}
    manifest = Manifest(
        base_model="m",
        device=CPU,
        dtype="float32",
        memories=memory.memories,
        tensors={name: memory.entry(name, view) for name, view in views.items()},
        left={"d": "tied"},
    )
    return manifest, memory, [fused, half]


def main() -> None:
    """See above."""
    what, output_dir = sys.argv[1], Path(sys.argv[2])
    if what == "lend":
        manifest, memory, _ = lent_tensors()

        def make() -> tuple[Manifest, Lender]:
            return manifest, memory

        lend(output_dir, CPU, make=make)
    else:
        tensors = borrow(output_dir, torch.device(CPU), timeout_s=TIMEOUT_S).tensors
        if what == "write":
            tensors["a"].zero_()
    print("ready", flush=True)
    for line in sys.stdin:  # ends with its parent
        if line == "sum\n":
            print(float(tensors["a"].sum()), flush=True)


if __name__ == "__main__":
    main()
