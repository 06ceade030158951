"""A process that exports two tensors on the first GPU: `python -m tests.gpu.exporter OUTPUT_DIR` prints `ready`, and
then the sum of the first for each line that it reads.

Not yet run: needs a GPU.
"""

import sys

import torch
from grpo.transport.shared_base import CudaMemory, Manifest, device_key, export_base


def main() -> None:
    """See above."""
    device = torch.device("cuda", 0)
    fused = torch.arange(12.0, device=device).view(6, 2)

    def make() -> tuple[Manifest, CudaMemory]:
        memory = CudaMemory()
        tensors = {"a": memory.entry("a", fused[:4]), "b": memory.entry("b", fused[4:])}
        manifest = Manifest(
            base_model="m",
            device=device_key(device),
            dtype="float32",
            memories=memory.memories,
            tensors=tensors,
            left={},
        )
        return manifest, memory

    export_base(sys.argv[1], device_key(device), make=make)
    print("ready", flush=True)
    for _ in sys.stdin:
        torch.cuda.synchronize(device)
        print(float(fused.sum()), flush=True)


if __name__ == "__main__":
    main()
