"""What the orchestrator itself takes: against a server that answers at once, and a trainer that only receives.

    python -m benchmarks.orchestrator [--check] [--rollouts N]

The real program runs in a process of its own, from its start-up to its summary: sampling over HTTP, rewards by an
environment in its worker process, advantages, packing, shipping over the filesystem, relaying versions, the ledger. It
is held to one core, together with the environment's process. Server and trainer are stand-ins in another process, on
another core where there is one: the server has canned answers of 64 tokens, the trainer publishes a version for each
batch and computes nothing.

- `speed`: rollouts a second, in steps of 1,024 in groups of 8, from the third step to the last. The event loop's lag is
  how much too late a task comes back that sleeps 5 ms. Memory is the resident set of the orchestrator's process; its
  slope is fitted to the second half of the run.
- `flight`: the server holds each answer back for 4 seconds, and a step has 10,000 rollouts.

`--rollouts` is what `speed` runs to (default 250,000); give 1,000,000 for a long run's memory. The last line is one
JSON object. `--check` exits 1 where a target is missed.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from orchestrator.envs.base import Environment
from orchestrator.rollouts.rubric import Rubric

MODEL = Path(__file__).parents[1] / "configs/quickstart/model"
GROUP_SIZE, NUM_TOKENS, SEQ_LEN = 8, 64, 2048
NUM_EXAMPLES, NUM_ANSWERS = 10_000, 256
SPEED_BATCH, FLIGHT_BATCH, FLIGHT_STEPS, FLIGHT_DELAY_S = 1024, 10_000, 4, 4.0
NUM_SKIPPED = 2
"""Steps before the measurement."""
PROBE_S = 0.005
MEMORY_INTERVAL_S = 0.25
WANTED_ROLLOUTS_PER_S, WANTED_IN_FLIGHT, WANTED_LAG_S = 1500.0, 10_000, 0.05
WANTED_BYTES_PER_ROLLOUT = 64.0
"""Slope of the memory that counts as flat: 64 MB for a million rollouts."""
LIMIT_S = 3600.0


def is_even(completion: str, example: Mapping[str, Any]) -> float:
    """1 for half of all answers."""
    return float(ord(completion[0]) % 2)


class Trivial(Environment):
    """Costs nothing but its calls."""

    rubric = Rubric([is_even])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": f"Example {number}"} for number in range(NUM_EXAMPLES)]


# --- the stand-ins ---


class Server:
    """Answers like grpo-infer; the choices of a request are always the same."""

    def __init__(self, delay_s: float) -> None:
        from transport.weights.identity import base_identity

        self._delay_s = delay_s
        self.num_in_flight = self.most_in_flight = 0
        draw = random.Random(0)
        choices = []
        for _ in range(NUM_ANSWERS):
            ids = [draw.randrange(97, 123) for _ in range(NUM_TOKENS)]
            logprobs = [-draw.random() for _ in ids]
            choices.append({"token_ids": ids, "logprobs": logprobs, "finish_reason": "length", "stop_reason": None})
        self._choices = [json.dumps(choices[at : at + GROUP_SIZE]) for at in range(0, NUM_ANSWERS, GROUP_SIZE)]
        self._num_answered = 0
        self._info = {
            "base_model": base_identity(MODEL),
            "max_model_len": SEQ_LEN,
            "max_lora_rank": 16,
            "load": {"num_running": 0, "num_waiting": 0, "kv_use": 0.0},
            "in_flight": {},
        }
        self._live: set[int] = set()
        self._of_run: dict[str, str] = {}

    async def start(self) -> int:
        """The port it listens on."""
        from aiohttp import web

        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/policy/info", self._say),
                web.post("/policy/load", self._load),
                web.post("/policy/unload", self._unload),
                web.post("/policy/generate", self._generate),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        return int(runner.addresses[0][1])

    async def _health(self, _: Any) -> Any:
        from aiohttp import web

        return web.Response()

    async def _say(self, _: Any) -> Any:
        from aiohttp import web

        return web.json_response(self._info | self._of_run | {"live": sorted(self._live)})

    async def _load(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        self._live.add(version := body["version"])
        self._of_run = {"run_id": body["run_id"]}
        canary = {"max_abs": 0.0, "mean_abs": 0.0, "tolerance": 1e-4, "measure": "max_abs"}
        report = {"version": version, "name": f"policy-v{version}", "canary": canary, "load_s": 0.0, "canary_s": 0.0}
        return web.json_response(report)

    async def _unload(self, request: Any) -> Any:
        from aiohttp import web

        self._live.discard(version := (await request.json())["version"])
        return web.json_response({"version": version, "in_flight": 0})

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        body = json.loads(await request.read())
        self.num_in_flight += body["n"]
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        self.num_in_flight -= body["n"]
        self._num_answered += 1
        choices = self._choices[self._num_answered % len(self._choices)]
        return web.Response(
            text=f'{{"version": {body["version"]}, "choices": {choices}}}', content_type="application/json"
        )


def train(output_dir: Path) -> None:
    """Makes the run, receives every batch, publishes the next version, and returns at the run's end."""
    from configs.common import publisher_arguments
    from configs.train import TrainSettings
    from transport.batches.filesystem import FilesystemBatchReceiver
    from transport.errors import DeadlineError
    from transport.records import PolicySpec
    from transport.run import create_run, join_run, only_one
    from transport.weights.identity import base_identity
    from transport.weights.store import METRICS_FILE, open_publisher

    run = create_run(output_dir)
    settings = TrainSettings.model_validate({"model": str(MODEL), "sequence_len": SEQ_LEN, "ckpt": {"interval": None}})
    join_run(output_dir, role="train", settings=settings.model_dump(mode="json"), timeout_s=1)
    publisher = open_publisher(run, **publisher_arguments(settings.weight_broadcast))
    spec = PolicySpec(
        base_model=base_identity(MODEL),
        rank=16,
        alpha=32,
        target_modules=("q_proj",),
        sequence_len=SEQ_LEN,
        dtype="float32",
    )
    publisher.publish(version=0, spec=spec, files={"canary.json": b"{}"})
    receiving = FilesystemBatchReceiver(run.batches, run_id=run.run_id)
    with only_one(output_dir, "train"), receiving as receiver, suppress(DeadlineError):
        step = 1
        while receiver.receive(step, timeout_s=LIMIT_S) is not None:
            metrics = {"loss/policy": 0.0, "time/train_s": 0.0, "perf/train_tokens": 0.0}
            files = {"canary.json": b"{}", METRICS_FILE: json.dumps(metrics).encode()}
            publisher.publish(version=step, spec=spec, files=files)
            step += 1


def train_or_end(output_dir: Path) -> None:
    """`train`; where it fails, the process ends, so that nobody waits for it."""
    try:
        train(output_dir)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def stand_in(output_dir: str, delay_s: float, cores: set[int], connection: Connection) -> None:
    """The stand-ins' process: says the server's port; when asked, the most rollouts that were in flight at once."""
    os.sched_setaffinity(0, cores)
    raise_file_limit()

    async def serve() -> None:
        server = Server(delay_s)
        connection.send(await server.start())
        threading.Thread(target=train_or_end, args=(Path(output_dir),), daemon=True).start()
        await asyncio.to_thread(connection.recv)
        connection.send(server.most_in_flight)

    asyncio.run(serve())


# --- the orchestrator's process ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was measured in the orchestrator's process."""

    lags_s: Sequence[float]
    memory: Sequence[tuple[float, int]]
    """Seconds and bytes."""
    cpu_s: float
    """Processor time of the orchestrator's process."""
    children_cpu_s: float
    """And of its children."""


def orchestrate_measured(settings: dict[str, Any], cores: set[int], connection: Connection) -> None:
    """Runs the program, and sends what was seen."""
    os.sched_setaffinity(0, cores)
    raise_file_limit()
    from configs.orch import OrchSettings
    from orchestrator.run import orchestrate

    lags_s: list[float] = []
    memory: list[tuple[float, int]] = []
    begun = Path(settings["output_dir"]) / "metrics.jsonl"

    async def probe() -> None:
        while not (begun.exists() and begun.stat().st_size):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.05)
        remembered_s = 0.0
        while True:
            asked_s = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            now_s = time.perf_counter()
            lags_s.append(now_s - asked_s - PROBE_S)
            if now_s - remembered_s > MEMORY_INTERVAL_S:
                memory.append((now_s, resident_bytes()))
                remembered_s = now_s

    async def both() -> None:
        probing = asyncio.create_task(probe())
        try:
            await orchestrate(OrchSettings.model_validate(settings))
        finally:
            probing.cancel()

    asyncio.run(both())
    usage, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    connection.send(
        Seen(
            lags_s=lags_s,
            memory=memory,
            cpu_s=usage.ru_utime + usage.ru_stime,
            children_cpu_s=children.ru_utime + children.ru_stime,
        )
    )


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def raise_file_limit() -> None:
    """Lets this process have as many connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# --- the measurement ---


def settings_for(output_dir: Path, port: int, *, batch_size: int, num_steps: int) -> dict[str, Any]:
    """Of one run."""
    return {
        "model": {"name": str(MODEL)},
        "env": [{"id": f"{Path(__file__)}:Trivial", "name": "trivial"}],
        "output_dir": str(output_dir),
        "batch_size": batch_size,
        "rollouts_per_example": GROUP_SIZE,
        "seq_len": SEQ_LEN,
        "max_steps": num_steps,
        "sampling": {"max_tokens": NUM_TOKENS},
        "eval": {"num_examples": 0},
        "client": {"base_url": [f"http://127.0.0.1:{port}/v1"]},
    }


def measured(folder: Path, *, batch_size: int, num_steps: int, delay_s: float) -> tuple[Seen, list[float], int]:
    """What was seen, the seconds of each step that counts, and the most rollouts that were in flight at once."""
    cores = sorted(os.sched_getaffinity(0))
    first, other = {cores[0]}, {cores[-1]}
    context = multiprocessing.get_context("spawn")
    stubs, theirs = context.Pipe()
    stub = context.Process(target=stand_in, args=(str(folder), delay_s, other, theirs), daemon=True)
    stub.start()
    settings = settings_for(folder, stubs.recv(), batch_size=batch_size, num_steps=num_steps)
    ours, its = context.Pipe()
    program = context.Process(target=orchestrate_measured, args=(settings, first, its))
    program.start()
    its.close()
    try:
        wait([ours, stub.sentinel], timeout=LIMIT_S)
        if not ours.poll():
            raise RuntimeError("the stand-ins ended, or the orchestrator took too long; see above")
        seen: Seen = ours.recv()
        stubs.send(None)
        most = int(stubs.recv())
    except EOFError:
        raise RuntimeError("the orchestrator's process ended without a result; see above") from None
    finally:
        for process in (program, stub):
            process.terminate()
            process.join()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["time/step_s"] for line in lines if line.get("time/step_s") and line["progress/step"] > NUM_SKIPPED]
    return seen, steps, most


def bytes_per_s(memory: Sequence[tuple[float, int]]) -> float:
    """Slope of a line through the second half."""
    half = memory[len(memory) // 2 :]
    return statistics.linear_regression([second for second, _ in half], [size for _, size in half]).slope


def lag_figures(seen: Seen) -> dict[str, float]:
    """In milliseconds."""
    lags_ms = sorted(1e3 * lag for lag in seen.lags_s)
    return {
        "lag_p50_ms": round(statistics.median(lags_ms), 2),
        "lag_p99_ms": round(lags_ms[int(0.99 * len(lags_ms))], 2),
        "lag_max_ms": round(lags_ms[-1], 1),
    }


def measure_speed(num_rollouts: int) -> dict[str, float]:
    """Of the orchestrator when nothing keeps it waiting."""
    num_steps = max(NUM_SKIPPED + 2, num_rollouts // SPEED_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        seen, step_s, _ = measured(Path(folder) / "run", batch_size=SPEED_BATCH, num_steps=num_steps, delay_s=0.0)
    per_s = SPEED_BATCH * len(step_s) / sum(step_s)
    return {
        "rollouts": SPEED_BATCH * num_steps,
        "rollouts_per_s": round(per_s, 1),
        "cpu_us_per_rollout": round(1e6 * seen.cpu_s / (SPEED_BATCH * num_steps), 1),
        "worker_cpu_us_per_rollout": round(1e6 * seen.children_cpu_s / (SPEED_BATCH * num_steps), 1),
        **lag_figures(seen),
        "resident_mb": round(seen.memory[-1][1] / 1e6, 1),
        "bytes_per_rollout": round(bytes_per_s(seen.memory) / per_s, 1),
    }


def measure_flight() -> dict[str, float]:
    """With many rollouts in flight."""
    with tempfile.TemporaryDirectory() as folder:
        seen, step_s, most = measured(
            Path(folder) / "run", batch_size=FLIGHT_BATCH, num_steps=FLIGHT_STEPS, delay_s=FLIGHT_DELAY_S
        )
    return {"in_flight": most, "step_s": round(statistics.median(step_s), 2), **lag_figures(seen)}


def main() -> None:
    """Prints a table and, last, one JSON object; with --check, exits with 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument("--rollouts", type=int, default=250_000, help="rollouts of the run for speed (default: 250000)")
    options = parser.parse_args()
    speed = measure_speed(options.rollouts)
    flight = measure_flight()
    for name, figures in {"speed": speed, "flight": flight}.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:<28}{value:>12,}")
    missed = {
        f"fewer than {WANTED_ROLLOUTS_PER_S:g} rollouts a second": speed["rollouts_per_s"] < WANTED_ROLLOUTS_PER_S,
        f"fewer than {WANTED_IN_FLIGHT} in flight": flight["in_flight"] < WANTED_IN_FLIGHT,
        "lag over 50 ms": max(speed["lag_p99_ms"], flight["lag_p99_ms"]) > 1e3 * WANTED_LAG_S,
        "memory is not flat": speed["bytes_per_rollout"] > WANTED_BYTES_PER_ROLLOUT,
    }
    misses = [what for what, is_missed in missed.items() if is_missed]
    print("all targets met" if not misses else f"missed: {'; '.join(misses)}")
    print(json.dumps({"benchmark": "orchestrator", "holds": not misses, "speed": speed, "flight": flight}))
    if options.check and misses:
        sys.exit(1)


if __name__ == "__main__":
    main()
