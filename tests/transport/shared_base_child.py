"""Processes that export or import two tensors of a run's folder, for tests that kill them.

`python -m tests.transport.shared_base_child export|import|write OUTPUT_DIR` prints `ready` and then lives on.
"""

import sys
from pathlib import Path

import torch
from grpo.transport.shared_base import HostMemory, Manifest, aligned, export_base, import_base

FUSED = torch.arange(12.0).view(6, 2)
HALF = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
TIMEOUT_S = 60.0


def exported() -> tuple[Manifest, HostMemory, list[torch.Tensor]]:
    """`a` and `b`, rows 0 to 3 and 4 to 5 of one fused tensor, and `c` in 16 bits; and the exporter's own tensors."""
    memory = HostMemory(aligned(FUSED.nbytes) + aligned(HALF.nbytes))
    fused, half = memory.place(FUSED), memory.place(HALF)
    views = {"a": fused[:4], "b": fused[4:], "c": half}
    entries = {name: memory.entry(name, view) for name, view in views.items()}
    names = {"base_model": "m", "device": "cpu", "dtype": "float32"}
    return Manifest(**names, memories=memory.memories, tensors=entries, left={"d": "tied"}), memory, [fused, half]


def main() -> None:
    """See above."""
    what, output_dir = sys.argv[1], Path(sys.argv[2])
    if what == "export":
        manifest, memory, _ = exported()
        export_base(output_dir, "cpu", make=lambda: (manifest, memory))
    else:
        base = import_base(output_dir, torch.device("cpu"), timeout_s=TIMEOUT_S)
        if what == "write":
            base.tensors["a"].zero_()
    print("ready", flush=True)
    for _ in sys.stdin:  # ends with its parent
        print(float(base.tensors["a"].sum()), flush=True)


if __name__ == "__main__":
    main()
