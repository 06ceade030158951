"""Tries which model types the installed vLLM serves with an adapter, one after the other, on a CPU.

    python -m benchmarks.served_models [MODEL_TYPE ...]

Each type that the trainer takes: a small random model, an adapter on all its linear layers as the trainer publishes it,
and a real server that loads it and proves it by the canary. Prints a line a type: the largest difference at the canary
in nats, or the last words of the server.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.distributed import ONE
from grpo.trainer.model import load_policy
from grpo.trainer.publishing import Publishing, policy_spec, publisher_of
from grpo.trainer.supported import PACKED, UNPACKED
from grpo.transport.run import RunFolder, create_run
from grpo.transport.weights.identity import base_identity

from tests.infer.server_process import running
from tools.random_models import make_small


def publish(model: Path, folder: Path) -> RunFolder:
    """Makes a run whose version 1 is a random adapter on all linear layers of the model."""
    run, device = create_run(folder), torch.device("cpu")
    settings = TrainSettings(model=str(model), recipe="fp32", sequence_len=256, device="cpu", output_dir=str(folder))
    policy = load_policy(settings, model, device)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    spec, publisher = policy_spec(settings, policy, base_identity(model)), publisher_of(settings.weight_broadcast, run)
    publishing = Publishing(settings, policy, publisher, spec=spec, ranks=ONE, imported=None)
    publishing.publish(version=1, metrics=None)
    publishing.flush()
    publishing.close()
    return run


def tried(kind: str, folder: Path) -> str:
    """Returns what a server did with a model of this type and its adapter."""
    model, log = make_small(folder / "model", kind), folder / "server.log"
    run = publish(model, folder / "run")
    settings: dict[str, Any] = {
        "model": model,
        "output_dir": run.path,
        "device": "cpu",
        "max_model_len": 256,
        "max_lora_rank": 16,
    }
    try:
        with running(log=log, **settings) as server:
            answer = server.post("/policy/load", {"run_id": run.run_id, "version": 1}).json()
            return str(answer.get("canary") or answer)
    except AssertionError:
        text = log.read_text()
        found = re.findall(r"^.*(?:Error|error): .*$", text, re.MULTILINE)
        return "\n    ".join(["ended", *found[-6:]])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE", help="only these types")
    for kind in parser.parse_args().kinds or sorted(PACKED | UNPACKED):
        with tempfile.TemporaryDirectory() as folder:
            print(kind, tried(kind, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
