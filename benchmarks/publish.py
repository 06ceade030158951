"""A new policy is in use at once: from the trainer's call to the first token under it, and its share of a step.

    python -m benchmarks.publish [--check]

Publishes versions of a 10 MB adapter (rank 32 on the 29M random Qwen3, float32) through the trainer's own `publish`,
relays them as the orchestrator does to the real server on a CPU, and asks for one token of each. Then runs the
quickstart for some steps and adds up what publishing takes of them. Claims: 400 ms at the median from call to token,
server idle; publishing holds up the quickstart's steps by less than 2% of their time. What goes on beside the steps,
writing the files and loading them while rollouts of the version before go on, is shown too.
"""

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from configs.train import TrainSettings
from orchestrator.client import LoadReport, ServerPool
from orchestrator.loop import POLL_S
from tests.infer.server_process import Server, running
from tests.tiny_models import make_mid
from trainer.loop import Trainer, policy_spec
from trainer.model import load_policy
from transport.batches.memory import MemoryBatches, MemoryBatchReceiver
from transport.run import RunFolder, found_run
from transport.status import PeerWatch, StatusFile
from transport.weights.channel import open_publisher
from transport.weights.filesystem import FilesystemPolicyReader
from transport.weights.identity import base_identity

RANK = 32
NUM_VERSIONS = 15
NUM_WARM_UP = 3
QUICKSTART_STEPS = 20
NUM_BUSY = 16
BUSY_TOKENS = 64
PROMPT = list(range(40, 56))
WANTED_S = 0.4
WANTED_SHARE = 0.02
Phases = Mapping[str, float]
PHASES = ("call", "seen", "load", "canary", "token", "total")


def make_trainer(model_dir: Path, run: RunFolder) -> Trainer:
    """The trainer with its own settings, one thread, and no batches."""
    torch.set_num_threads(1)
    settings = TrainSettings(model=str(model_dir), recipe="fp32", sequence_len=256, lora_rank=RANK, lora_alpha=2 * RANK)
    policy = load_policy(
        model_dir,
        name=settings.model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        rank=RANK,
        alpha=2 * RANK,
        target_modules=settings.lora_target_modules,
        sequence_len=256,
    )
    return Trainer(
        settings,
        policy,
        spec=policy_spec(settings, policy, base_identity(model_dir)),
        receiver=MemoryBatchReceiver(MemoryBatches(run_id=run.run_id)),
        publisher=open_publisher(run, **settings.weight_broadcast.of_publisher()),
        status=StatusFile(run.status / "train.json"),
        orchestrator=PeerWatch(run.status / "orch.json", name="grpo-orch"),
    )


def move(trainer: Trainer, version: int) -> None:
    """Changes every weight a little, as a step does."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trainer._policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


async def until_first_token(trainer: Trainer, servers: ServerPool, run: RunFolder, version: int) -> Phases:
    """Seconds of each phase of one version, as trainer and orchestrator go through them."""
    reader = FilesystemPolicyReader(run.broadcasts, run_id=run.run_id)
    began_s = time.perf_counter()
    publishing = threading.Thread(target=trainer.publish, kwargs={"version": version, "metrics": None})
    publishing.start()
    while reader.poll(version) is None:  # noqa: ASYNC110 - as the orchestrator does
        await asyncio.sleep(POLL_S)
    seen_s = time.perf_counter()
    [server] = servers.servers
    report = await servers.once(
        server, "POST", "/policy/load", LoadReport, run_id=run.run_id, version=version, alias="default"
    )
    loaded_s = time.perf_counter()
    await servers.generate(
        prompt_token_ids=PROMPT, num=1, version=version, max_tokens=1, min_tokens=0, temperature=1.0, seed=version
    )
    ended_s = time.perf_counter()
    publishing.join()
    if version > 0:
        await servers.once(server, "POST", "/policy/unload", dict, version=version - 1)
    return {
        "call": trainer._times_s["time/publish_s"],
        "seen": seen_s - began_s,
        "load": loaded_s - seen_s - report.canary_s,
        "canary": report.canary_s,
        "token": ended_s - loaded_s,
        "total": ended_s - began_s,
    }


async def keep_busy(servers: ServerPool) -> None:
    """Rollouts of the base model's weights, as many as keep the server decoding. Ends by being cancelled."""
    [server] = servers.servers

    async def roll_out(number: int) -> None:
        while True:
            request = {"prompt_token_ids": [*PROMPT, number], "max_tokens": BUSY_TOKENS, "temperature": 1.0}
            await servers.once(server, "POST", "/policy/generate", dict, version=None, **request)

    await asyncio.gather(*(roll_out(number) for number in range(NUM_BUSY)))


async def publish_all(server: Server, trainer: Trainer, run: RunFolder) -> dict[str, list[Phases]]:
    """The phases of every version, with the server idle and busy, after some to warm up."""
    servers, phases, version = ServerPool([server.url], api_key=None, timeout_s=60), dict[str, list[Phases]](), 0
    for _ in range(NUM_WARM_UP):
        await until_first_token(trainer, servers, run, version)
        version += 1
    for state in ("idle", "busy"):
        load = asyncio.create_task(keep_busy(servers)) if state == "busy" else None
        phases[state] = []
        for _ in range(NUM_VERSIONS):
            move(trainer, version)
            await asyncio.sleep(0.1)
            phases[state].append(await until_first_token(trainer, servers, run, version))
            version += 1
        if load is not None:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    await servers.close()
    return phases


def quickstart_shares(folder: Path) -> dict[str, float]:
    """Share of the steps' time that publishing holds up the trainer, and that loading takes beside it."""
    command = [sys.executable, "-m", "deploy.cli", "configs/quickstart", "--max_steps", str(QUICKSTART_STEPS)]
    subprocess.run([*command, "--output_dir", str(folder)], check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Without the first step, in which everything starts up.
    steps = [line for line in lines if line.get("time/step_s") and line["progress/step"] > 1]
    total_s = sum(line["time/step_s"] for line in steps)
    return {
        name: sum(line[f"time/{name}_s"] for line in steps) / total_s for name in ("publish", "load", "write_version")
    }


def measure(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, float], int]:
    """Median phases by the server's state, the quickstart's shares, and the adapter's size in bytes."""
    shares = quickstart_shares(folder / "quickstart")
    model_dir, run = make_mid(folder / "mid", dtype="float32"), found_run(folder / "run")
    with running(
        log=folder / "infer.log", model=model_dir, output_dir=run.path, max_lora_rank=RANK, dtype="float32"
    ) as server:
        trainer = make_trainer(model_dir, run)
        phases = asyncio.run(publish_all(server, trainer, run))
        trainer.close()
    size = (run.broadcasts / f"step_{NUM_VERSIONS:06d}" / "adapter_model.safetensors").stat().st_size
    medians = {
        state: {phase: statistics.median(one[phase] for one in all_) for phase in PHASES}
        for state, all_ in phases.items()
    }
    return medians, shares, size


def main() -> None:
    """Prints a table and, last, one JSON object; with --check, exits with 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 unless both claims hold")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        medians, shares, size = measure(Path(folder))
    print(f"{f'adapter of {size / 1e6:.1f} MB, medians in ms':<44}{'server idle':>14}{'server busy':>14}")
    labels = ("trainer held up by its call", "call to seen by the orchestrator", "checked and loaded", "canary proved")
    for phase, label in zip(PHASES, (*labels, "first token", "call to first token"), strict=True):
        print(f"{label:<44}{1e3 * medians['idle'][phase]:>14.1f}{1e3 * medians['busy'][phase]:>14.1f}")
    print("share of the quickstart's steps")
    beside = {"publish": "held up by publishing", "write_version": "files written, beside", "load": "loaded, beside"}
    for name, label in beside.items():
        print(f"{label:<44}{shares[name]:>14.2%}")
    holds = medians["idle"]["total"] < WANTED_S and shares["publish"] < WANTED_SHARE
    figures = {
        "adapter_bytes": size,
        "first_token_ms": round(1e3 * medians["idle"]["total"], 1),
        "first_token_busy_ms": round(1e3 * medians["busy"]["total"], 1),
        "publish_share": round(shares["publish"], 4),
        "load_share": round(shares["load"], 4),
    }
    print(json.dumps({"benchmark": "publish", "holds": holds, **figures}))
    if options.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
