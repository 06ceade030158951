"""A new policy is in use at once: from the trainer's call to the first token under it, and its share of a step.

    python -m benchmarks.publish [--check]

Publishes versions of a 10 MB adapter (rank 32 on the 29M random Qwen3, float32) through the trainer's own `publish`,
has the real server on a CPU load and prove each as the orchestrator does, and asks for one token of it: with the server
idle, and busy with rollouts. Then runs the quickstart for some steps and adds up what publishing takes of them. Claims:
400 ms at the median from call to token, server idle; of a step's time in the quickstart, publishing takes less than 2%:
what it holds up the trainer. What goes on beside the next step (files written, loaded, proved) is reported as well.
"""

import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import msgspec
import torch

from benchmarks.report import parser, report
from configs.train import TrainSettings
from orchestrator.loops.versions import POLL_S
from tools.random_models import make_mid
from trainer.distributed import ONE
from trainer.model import load_policy
from trainer.publishing import Publishing, policy_spec, publisher_of
from transport.http import GenerateRequest, LoadReport, LoadRequest, UnloadRequest
from transport.ports import free_port
from transport.records import Record
from transport.run import RunFolder, create_run
from transport.weights.identity import base_identity
from transport.weights.store import PolicyReader

RANK = 32
NUM_VERSIONS, NUM_WARM_UP = 15, 3
QUICKSTART_STEPS = 20
NUM_BUSY, BUSY_TOKENS = 16, 64
PROMPT = list(range(40, 56))
START_S = 240.0
TARGETS = {"idle total_ms": ("<=", 400.0), "publish_share": ("<=", 0.02)}
PHASES = ("call", "seen", "load", "canary", "token", "total")
"""The trainer held up by its call; call to seen by the orchestrator; checked and loaded; canary proved; first token;
call to first token."""


def make_trainer(model_dir: Path, run: RunFolder) -> Publishing:
    """The trainer with its own settings, one thread, and no batches."""
    torch.set_num_threads(1)
    options = {"recipe": "fp32", "sequence_len": 256, "lora_rank": RANK, "lora_alpha": 2 * RANK}
    settings = TrainSettings.model_validate({"model": str(model_dir)} | options)
    policy = load_policy(settings, model_dir, torch.device("cpu"))
    spec = policy_spec(settings, policy, base_identity(model_dir))
    publisher = publisher_of(settings.weight_broadcast, run)
    return Publishing(settings, policy, publisher, spec=spec, ranks=ONE, imported=None)


def move(trainer: Publishing, version: int) -> None:
    """Changes every weight a little, as a step does."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trainer._policy.parameters:
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)


class Server:
    """A `grpo-infer` of its own."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, request: Record) -> bytes:
        """The body of an answer."""
        answer = self._client.post(path, content=msgspec.json.encode(request))
        answer.raise_for_status()
        return answer.content

    def wait_until_up(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Fails with the log's end when the process has ended, or after `START_S`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise SystemExit(f"grpo-infer did not come up within {START_S:g} s:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def running_server(model_dir: Path, run: RunFolder, log: Path) -> Iterator[Server]:
    """A server of the model, which ends with the context."""
    port = free_port()
    options = {"model": model_dir, "output_dir": run.path, "max_lora_rank": RANK, "dtype": "float32", "port": port}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    with log.open("wb") as file:
        command = [sys.executable, "-m", "infer.cli", *words]
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "VLLM_API_KEY": ""})
    try:
        server = Server(f"http://127.0.0.1:{port}")
        server.wait_until_up(process, log)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def until_first_token(trainer: Publishing, server: Server, run: RunFolder, version: int) -> Mapping[str, float]:
    """Seconds of each phase of one version, as trainer and orchestrator go through them."""
    reader = PolicyReader(run.broadcasts, run_id=run.run_id)
    began_s = time.perf_counter()
    publishing = threading.Thread(target=trainer.publish, kwargs={"version": version, "metrics": None})
    publishing.start()
    while reader.poll(version) is None:
        time.sleep(POLL_S)
    seen_s = time.perf_counter()
    request = LoadRequest(run_id=run.run_id, version=version, alias="default")
    report = LoadReport.from_json(server.post("/policy/load", request))
    loaded_s = time.perf_counter()
    server.post("/policy/generate", GenerateRequest(version=version, prompt_token_ids=PROMPT, max_tokens=1))
    ended_s = time.perf_counter()
    publishing.join()
    if version > 0:
        server.post("/policy/unload", UnloadRequest(version=version - 1))
    return {
        "call": trainer._times_s["time/publish_s"],
        "seen": seen_s - began_s,
        "load": loaded_s - seen_s - report.canary_s,
        "canary": report.canary_s,
        "token": ended_s - loaded_s,
        "total": ended_s - began_s,
    }


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """Within it, rollouts of the base model's weights keep the server decoding."""
    ended = threading.Event()

    def roll_out(number: int) -> None:
        while not ended.is_set():
            request = GenerateRequest(version=None, prompt_token_ids=[*PROMPT, number], max_tokens=BUSY_TOKENS)
            server.post("/policy/generate", request)

    threads = [threading.Thread(target=roll_out, args=(number,)) for number in range(NUM_BUSY)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def publish_all(server: Server, trainer: Publishing, run: RunFolder) -> dict[str, dict[str, float]]:
    """Median phases of the versions, with the server idle and busy, after some to warm up."""
    for version in range(NUM_WARM_UP):
        until_first_token(trainer, server, run, version)
    medians, version = {}, NUM_WARM_UP
    for state, load in (("idle", contextlib.nullcontext()), ("busy", busy(server))):
        phases = []
        with load:
            for _ in range(NUM_VERSIONS):
                move(trainer, version)
                time.sleep(0.1)
                phases.append(until_first_token(trainer, server, run, version))
                version += 1
        medians[state] = {phase: statistics.median(one[phase] for one in phases) for phase in PHASES}
    return medians


def quickstart_shares(folder: Path) -> dict[str, float]:
    """Shares of the steps' time: publishing holds up the trainer, files are written and loaded beside."""
    command = [sys.executable, "-m", "grpo.cli", "configs/quickstart", "--max_steps", str(QUICKSTART_STEPS)]
    subprocess.run([*command, "--output_dir", str(folder)], check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Without the first step, in which everything starts up.
    steps = [line for line in lines if line.get("time/step_s") and line["progress/step"] > 1]
    total_s = sum(line["time/step_s"] for line in steps)
    return {
        name: sum(line[f"time/{name}_s"] for line in steps) / total_s for name in ("publish", "write_version", "load")
    }


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shares = quickstart_shares(folder / "quickstart")
        model_dir, run = make_mid(folder / "mid", dtype="float32"), create_run(folder / "run")
        with running_server(model_dir, run, folder / "infer.log") as server:
            trainer = make_trainer(model_dir, run)
            medians = publish_all(server, trainer, run)
            trainer.close()
    figures = {f"{state} {phase}_ms": 1e3 * one[phase] for state, one in medians.items() for phase in PHASES}
    figures |= {f"{name}_share": share for name, share in shares.items()}
    return report("publish", figures, TARGETS, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
