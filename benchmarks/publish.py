"""A new policy is in use at once: from the trainer's call to the first token under it, and its share of a step.

    python -m benchmarks.publish [--check]

Publishes versions of a 10 MB adapter (rank 32 on the 29M random Qwen3, float32) through the trainer's own `publish`,
relays them as the orchestrator does to the real server on a CPU, and asks for one token of each. Then runs the
quickstart for some steps and adds up what publishing takes of them, and publishes versions of its adapter to an idle
server of its model, to see what processor time all three programs spend on one. Claims: 400 ms at the median from call
to token, server idle; of a step's time in the quickstart, publishing takes less than 2%: what it holds up the trainer.
What goes on beside the next step (files written, loaded, proved) is reported as well, in processor time too.
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

import psutil
import torch

from configs.common import publisher_arguments
from configs.train import TrainSettings
from deploy.cores import available_cores
from orchestrator.inference.client import InferenceClient
from orchestrator.inference.pool import ServerPool
from orchestrator.loops.versions import POLL_S
from tests.infer.server_process import Server, running
from tools.random_models import make_mid
from trainer.distributed import ONE
from trainer.model import load_policy
from trainer.publishing import Publishing, policy_spec
from transport.http import Generated, GenerateRequest, LoadReport, LoadRequest, Unloaded, UnloadRequest
from transport.run import RunFolder, create_run
from transport.weights.identity import base_identity
from transport.weights.store import PolicyReader, open_publisher

RANK = 32
NUM_VERSIONS = 15
NUM_WARM_UP = 3
QUICKSTART_STEPS = 20
NUM_COUNTED = 100
NUM_BUSY = 16
BUSY_TOKENS = 64
PROMPT = list(range(40, 56))
WANTED_S = 0.4
WANTED_SHARE = 0.02
Phases = Mapping[str, float]
PHASES = ("call", "seen", "load", "canary", "token", "total")


def make_trainer(model_dir: Path, run: RunFolder, *, rank: int = RANK) -> Publishing:
    """The trainer with its own settings, one thread, and no batches."""
    torch.set_num_threads(1)
    settings = TrainSettings(model=str(model_dir), recipe="fp32", sequence_len=256, lora_rank=rank, lora_alpha=2 * rank)
    policy = load_policy(
        model_dir,
        name=settings.model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        rank=rank,
        alpha=2 * rank,
        target_modules=settings.lora_target_modules,
        sequence_len=256,
    )
    spec = policy_spec(settings, policy, base_identity(model_dir))
    publisher = open_publisher(run, **publisher_arguments(settings.weight_broadcast))
    return Publishing(settings, policy, publisher, spec=spec, ranks=ONE, imported=None)


def move(trainer: Publishing, version: int) -> None:
    """Changes every weight a little, as a step does."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trainer._policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


async def until_first_token(
    trainer: Publishing, client: InferenceClient, run: RunFolder, version: int, *, token: bool = True
) -> Phases:
    """Seconds of each phase of one version, as trainer and orchestrator go through them. The first token is sampled
    only where it is wanted."""
    reader = PolicyReader(run.broadcasts, run_id=run.run_id)
    began_s = time.perf_counter()
    publishing = threading.Thread(target=trainer.publish, kwargs={"version": version, "metrics": None})
    publishing.start()
    while reader.poll(version) is None:  # noqa: ASYNC110 - as the orchestrator does
        await asyncio.sleep(POLL_S)
    seen_s = time.perf_counter()
    [server] = client.pool.servers
    request = LoadRequest(run_id=run.run_id, version=version, alias="default")
    report = await client.once(server, "POST", "/policy/load", LoadReport, request)
    loaded_s = time.perf_counter()
    if token:
        first = GenerateRequest(version=version, prompt_token_ids=PROMPT, max_tokens=1, seed=version)
        await client.once(server, "POST", "/policy/generate", Generated, first)
    ended_s = time.perf_counter()
    publishing.join()
    if version > 0:
        await client.once(server, "POST", "/policy/unload", Unloaded, UnloadRequest(version=version - 1))
    return {
        "call": trainer._times_s["time/publish_s"],
        "seen": seen_s - began_s,
        "load": loaded_s - seen_s - report.canary_s,
        "canary": report.canary_s,
        "token": ended_s - loaded_s,
        "total": ended_s - began_s,
    }


async def keep_busy(client: InferenceClient) -> None:
    """Rollouts of the base model's weights, as many as keep the server decoding. Ends by being cancelled."""
    [server] = client.pool.servers

    async def roll_out(number: int) -> None:
        while True:
            request = GenerateRequest(version=None, prompt_token_ids=[*PROMPT, number], max_tokens=BUSY_TOKENS)
            await client.once(server, "POST", "/policy/generate", Generated, request)

    await asyncio.gather(*(roll_out(number) for number in range(NUM_BUSY)))


async def publish_all(server: Server, trainer: Publishing, run: RunFolder) -> dict[str, list[Phases]]:
    """The phases of every version, with the server idle and busy, after some to warm up."""
    client, phases, version = (
        InferenceClient(ServerPool([server.url]), api_key=None, timeout_s=60),
        dict[str, list[Phases]](),
        0,
    )
    for _ in range(NUM_WARM_UP):
        await until_first_token(trainer, client, run, version)
        version += 1
    for state in ("idle", "busy"):
        load = asyncio.create_task(keep_busy(client)) if state == "busy" else None
        phases[state] = []
        for _ in range(NUM_VERSIONS):
            move(trainer, version)
            await asyncio.sleep(0.1)
            phases[state].append(await until_first_token(trainer, client, run, version))
            version += 1
        if load is not None:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    await client.close()
    return phases


def processor_s(server: Server) -> float:
    """Processor seconds that this process and the server's have used up to now."""
    times = [psutil.Process(pid).cpu_times() for pid in (server.process.pid, *server.engine_pids())]
    return time.process_time() + sum(each.user + each.system for each in times)


async def processor_time(server: Server, trainer: Publishing, run: RunFolder) -> float:
    """Processor seconds of all three programs for one version, its first token left out: one request more or less
    does not matter to a step. What the programs use when nothing happens is not counted."""
    client, version = InferenceClient(ServerPool([server.url]), api_key=None, timeout_s=60), 0
    for _ in range(NUM_WARM_UP):
        await until_first_token(trainer, client, run, version, token=False)
        version += 1
    began_s, spent_s = time.perf_counter(), processor_s(server)
    for _ in range(NUM_COUNTED):
        move(trainer, version)
        await until_first_token(trainer, client, run, version, token=False)
        version += 1
    elapsed_s, spent_s = time.perf_counter() - began_s, processor_s(server) - spent_s
    idle_s = processor_s(server)
    await asyncio.sleep(elapsed_s)
    idle_s = processor_s(server) - idle_s
    await client.close()
    return (spent_s - idle_s) / NUM_COUNTED


def quickstart_processor_time(folder: Path) -> float:
    """`processor_time` of the quickstart's adapter."""
    model_dir, run = Path("configs/quickstart/model"), create_run(folder / "run")
    settings = {"model": model_dir, "output_dir": run.path, "dtype": "float32", "max_model_len": 128}
    with running(log=folder / "infer.log", **settings) as server:
        trainer = make_trainer(model_dir, run, rank=16)
        spent_s = asyncio.run(processor_time(server, trainer, run))
        trainer.close()
    return spent_s


def quickstart_shares(folder: Path) -> dict[str, float]:
    """Shares of the steps' time: publishing holds up the trainer, files are written and loaded beside. And seconds of
    a step."""
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--max_steps", str(QUICKSTART_STEPS)]
    subprocess.run([*command, "--output_dir", str(folder)], check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Without the first step, in which everything starts up.
    steps = [line for line in lines if line.get("time/step_s") and line["progress/step"] > 1]
    total_s = sum(line["time/step_s"] for line in steps)
    names = ("publish", "load", "write_version")
    shares = {name: sum(line[f"time/{name}_s"] for line in steps) / total_s for name in names}
    return shares | {"step_s": total_s / len(steps)}


def measure(folder: Path) -> tuple[dict[str, dict[str, float]], dict[str, float], int]:
    """Median phases by the server's state, the quickstart's shares, and the adapter's size in bytes."""
    shares = quickstart_shares(folder / "quickstart")
    (folder / "idle").mkdir()
    spent_s = quickstart_processor_time(folder / "idle")
    shares["processor"] = spent_s / (shares["step_s"] * available_cores())
    shares["processor_ms"] = 1e3 * spent_s
    model_dir, run = make_mid(folder / "mid", dtype="float32"), create_run(folder / "run")
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
    print("share of the quickstart's steps, and of the cores' time in them")
    beside = {
        "publish": "held up by publishing",
        "write_version": "from job to files, beside",
        "load": "from request to proof, beside",
        "processor": f"processor time of all ({shares['processor_ms']:.1f} ms)",
    }
    for name, label in beside.items():
        print(f"{label:<44}{shares[name]:>14.2%}")
    holds = medians["idle"]["total"] < WANTED_S and shares["publish"] < WANTED_SHARE
    figures = {
        "adapter_bytes": size,
        "first_token_ms": round(1e3 * medians["idle"]["total"], 1),
        "first_token_busy_ms": round(1e3 * medians["busy"]["total"], 1),
        "publish_share": round(shares["publish"], 4),
        "load_share": round(shares["load"], 4),
        "processor_share": round(shares["processor"], 4),
    }
    print(json.dumps({"benchmark": "publish", "holds": holds, **figures}))
    if options.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
