"""A trainer's model on imported weights in a process of its own, for tests that look at its memory and kill it.

`python -m tests.e2e.importer MODEL OUTPUT_DIR` reads a line of JSON a question and prints one an answer.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.colocate import imported_for
from grpo.trainer.distributed import ONE
from grpo.trainer.model import Policy, load_policy
from grpo.trainer.packing import pack
from grpo.transport.shared_base import ImportedBase

CPU = torch.device("cpu")


def logprobs(policy: Policy, token_ids: list[int]) -> torch.Tensor:
    """[L - 1] of one sequence at temperature 1."""
    length = len(token_ids)
    tokens = pack(
        np.array(token_ids, dtype=np.int32),
        np.array([length], dtype=np.int32),
        loss_mask=np.arange(length) > 0,
        temperatures=np.ones(length, dtype=np.float32),
        device=CPU,
    )
    return policy.logprobs(tokens)


def anonymous_bytes(pid: int | str = "self") -> int:
    """Of memory that a process has for itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def digest(imported: ImportedBase) -> str:
    """Of all imported bytes."""
    found = hashlib.sha256()
    for name in sorted(imported.tensors):
        found.update(imported.tensors[name].numpy().tobytes())
    return found.hexdigest()


def answer(question: dict[str, Any], policy: Policy, imported: ImportedBase) -> Any:
    """To `{"ask": "logprobs" | "step", "token_ids": …}`, `{"ask": "anonymous"}`."""
    match question["ask"]:
        case "logprobs":
            with torch.no_grad():
                return logprobs(policy, question["token_ids"]).tolist()
        case "step":
            before = digest(imported)
            optimizer = torch.optim.AdamW(policy.parameters, lr=0.05)
            (-logprobs(policy, question["token_ids"]).sum()).backward()
            optimizer.step()
            return {"before": before, "after": digest(imported)}
        case _:
            return anonymous_bytes()


def main() -> None:
    """See above."""
    model, output_dir = sys.argv[1:]
    torch.set_num_threads(1)
    settings = TrainSettings(
        model=model, output_dir=output_dir, colocate=True, recipe="fp32", lora_rank=8, lora_alpha=16, wait_timeout_s=60
    )
    before = anonymous_bytes()
    imported = imported_for(settings, CPU)
    assert imported
    policy = load_policy(settings, Path(model), CPU, ONE, imported=imported)
    print(json.dumps(anonymous_bytes() - before), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), policy, imported)), flush=True)


if __name__ == "__main__":
    main()
