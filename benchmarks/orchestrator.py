"""Measures the orchestrator alone: against a server that answers at once, and a trainer that only receives.

    python -m benchmarks.orchestrator [speed] [untraced] [flight] [ledger] [prompts] [--check] [--rollouts N]

In `speed` and `flight` the real program runs in a process of its own, from its start-up to its summary: sampling over
HTTP, an episode in the environment's worker for each single answer, advantages, packing, shipping over the filesystem,
loading versions, the ledger. It is held to one core, together with the environment's process. Server and trainer are
the tests' stand-ins in another process, on another core where there is one: answers are canned and have 64 tokens, the
trainer publishes a version for each batch and computes nothing.

- `speed`: rollouts a second, in steps of 1,024 in groups of 8, from the third step to the last. The event loop's lag is
  how much too late a task comes back that sleeps 5 ms. Memory is the resident set of the orchestrator's process and of
  the environment's; the slope is that of the first over the second half of the run. `--rollouts` (default 250,000; a
  million show whether memory is flat) is what it runs to.
- `untraced`: the same with `traces.every: null`, without the record of every token.
- `flight`: the server holds each answer back for 4 seconds, and a step has 10,000 rollouts.
- `ledger`: `grpo ledger` with a million rollouts, wall time of each command, the interpreter's start included.
- `prompts`: what the buffer costs a step of 128 groups with ten thousand prompts and with a million, and the processor
  time of an `issue` (99th percentile) with a million prompts, of which the worst share is easy or hard.

The last line is one JSON object. `--check` exits 1 where a target is missed.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from grpo.transport.limits import raise_file_limit

from benchmarks.report import parser, report
from grpo import Environment, Rubric

GROUP_SIZE, NUM_TOKENS, SEQ_LEN = 8, 64, 2048
NUM_EXAMPLES, NUM_ANSWERS = 10_000, 256
SPEED_BATCH, FLIGHT_BATCH, FLIGHT_STEPS, FLIGHT_DELAY_S = 1024, 10_000, 4, 4.0
NUM_SKIPPED = 2
"""Steps before the measurement."""
PROBE_S, MEMORY_INTERVAL_S = 0.005, 1.0
MEMORY_POINTS = (100_000, 250_000, 500_000, 750_000)
"""After so many rollouts the memory is looked at."""
LEDGER_STEPS = 977
"""Number of steps of 1,024 rollouts: a million rollouts in all."""
TARGETS = {
    "speed rollouts_per_s": (">=", 3000.0),
    "speed lag_p99_ms": ("<=", 50.0),
    "speed bytes_per_rollout": ("<=", 64.0),  # 64 MB for a million rollouts counts as flat
    "untraced rollouts_per_s": (">=", 3000.0),
    "flight in_flight": (">=", 10_000),
    "flight lag_p99_ms": ("<=", 50.0),
    **{f"ledger {name}_s": ("<=", 1.0) for name in ("totals", "group", "rollout", "step", "example")},
    "prompts ms_of_1000000": ("<=", 1.0),
    "prompts issue_p99_ms": ("<=", 1.0),
}
LIMIT_S = 3600.0


def is_even(completion: str) -> float:
    """1 for half of all answers."""
    return float(ord(completion[0]) % 2)


class Trivial(Environment):
    """Costs nothing but its calls."""

    rubric = Rubric([is_even])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": f"Example {number}"} for number in range(NUM_EXAMPLES)]


# --- the program, and its stand-ins ---


class Forgetful(dict[int, Any]):
    """Keeps nothing: a million rollouts are a gigabyte."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


def stand_in(output_dir: str, delay_s: float, cores: set[int], connection: Connection) -> None:
    """The stand-ins' process: says the server's address; when asked, the most rollouts that were in flight at once."""
    os.sched_setaffinity(0, cores)
    raise_file_limit()
    from aiohttp import web
    from grpo.transport.http import Choice, Generated
    from grpo.transport.records import MESSAGE_TYPE, to_body

    from tests.orchestrator.fakes import FakeServer, FakeTrainer

    class Canned(FakeServer):
        num_in_flight = most_in_flight = num_answered = 0

        def make_answers(self) -> None:
            draw = random.Random(0)
            choices = [
                Choice(
                    token_ids=np.array([draw.randrange(97, 123) for _ in range(NUM_TOKENS)], np.int32),
                    logprobs=np.array([-draw.random() for _ in range(NUM_TOKENS)], np.float32),
                    finish_reason="length",
                )
                for _ in range(NUM_ANSWERS)
            ]
            self.choices = [choices[at : at + GROUP_SIZE] for at in range(0, NUM_ANSWERS, GROUP_SIZE)]

        async def _generate(self, request: web.Request) -> web.Response:
            version = json.loads(await request.read())["version"]
            self.num_in_flight += GROUP_SIZE
            self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
            if delay_s:
                await asyncio.sleep(delay_s)
            self.num_in_flight -= GROUP_SIZE
            self.num_answered += 1
            choices = self.choices[self.num_answered % len(self.choices)]
            body = to_body(Generated(version=version, choices=choices), MESSAGE_TYPE)
            return web.Response(body=body, content_type=MESSAGE_TYPE)

    async def serve() -> None:
        server = Canned(max_model_len=SEQ_LEN)
        server.make_answers()
        await server.start()
        trainer = FakeTrainer(
            Path(output_dir), settings={"sequence_len": SEQ_LEN}, sequence_len=SEQ_LEN, idle_s=LIMIT_S
        )
        trainer.batches = Forgetful()
        trainer.start()
        connection.send(server.url)
        await asyncio.to_thread(connection.recv)
        connection.send(server.most_in_flight)

    asyncio.run(serve())


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measurements in the orchestrator's process."""

    lags_s: Sequence[float]
    memory: Sequence[tuple[float, int]]
    """Seconds and bytes of the orchestrator's process."""
    worker_memory: Sequence[tuple[float, int]]
    """And of its children."""
    cpu_s: float
    """Processor time of the orchestrator's process."""
    worker_cpu_s: float
    """And of its children."""


def orchestrate_measured(settings: dict[str, Any], cores: set[int], connection: Connection) -> None:
    """Runs the program, and sends what was seen."""
    os.sched_setaffinity(0, cores)
    from grpo.configs.orch import OrchSettings
    from grpo.orchestrator.run import orchestrate

    lags_s: list[float] = []
    memory: list[tuple[float, int]] = []
    worker_memory: list[tuple[float, int]] = []
    workers_s = [0.0]
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
                memory.append((now_s, psutil.Process().memory_info().rss))
                used_s, used_bytes = use_of_workers()
                workers_s.append(used_s)
                worker_memory.append((now_s, used_bytes))
                remembered_s = now_s

    async def both() -> None:
        probing = asyncio.create_task(probe())
        try:
            await orchestrate(OrchSettings.model_validate(settings))
        finally:
            probing.cancel()

    uvloop.run(both())
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    connection.send(
        Seen(lags_s=lags_s, memory=memory, worker_memory=worker_memory, cpu_s=cpu_s, worker_cpu_s=max(workers_s))
    )


def use_of_workers() -> tuple[float, int]:
    """Seconds of processor time until now, and resident bytes, of the processes below this one."""
    used_s, used_bytes = 0.0, 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used_s, used_bytes = used_s + times.user + times.system, used_bytes + process.memory_info().rss
    return used_s, used_bytes


def measured(
    folder: Path, *, batch_size: int, num_steps: int, delay_s: float = 0.0, traced: bool = True
) -> tuple[Seen, list[float], int]:
    """Returns the measurements, the seconds of each step that counts, and the most rollouts in flight at once."""
    from tests.orchestrator.fakes import FakeServer, settings_for

    cores, context = sorted(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    stubs, theirs = context.Pipe()
    stub = context.Process(target=stand_in, args=(str(folder), delay_s, {cores[-1]}, theirs), daemon=True)
    stub.start()
    server = FakeServer()
    server.url = stubs.recv()
    settings = settings_for(
        folder,
        server,
        env=[{"id": f"{Path(__file__)}:Trivial", "name": "trivial"}],
        batch_size=batch_size,
        rollouts_per_example=GROUP_SIZE,
        seq_len=SEQ_LEN,
        max_steps=num_steps,
        max_async_level=1,
        sampling={"max_tokens": NUM_TOKENS},
        eval={"num_examples": 0},
        traces={} if traced else {"every": None},
    ).model_dump(mode="json", exclude_unset=True)
    ours, its = context.Pipe()
    program = context.Process(target=orchestrate_measured, args=(settings, {cores[0]}, its))
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


# --- figures ---


def lag_figures(seen: Seen) -> dict[str, float]:
    """In milliseconds."""
    lags_ms = sorted(1e3 * lag for lag in seen.lags_s)
    p50, p99 = (lags_ms[int(share * len(lags_ms))] for share in (0.5, 0.99))
    return {"lag_p50_ms": round(p50, 2), "lag_p99_ms": round(p99, 2), "lag_max_ms": round(lags_ms[-1], 1)}


def measure_speed(folder: Path, num_rollouts: int, *, traced: bool) -> dict[str, float]:
    """Measures the orchestrator when nothing keeps it waiting."""
    num_steps = max(NUM_SKIPPED + 2, num_rollouts // SPEED_BATCH)
    seen, step_s, _ = measured(folder / "run", batch_size=SPEED_BATCH, num_steps=num_steps, traced=traced)
    per_s, num = SPEED_BATCH * len(step_s) / sum(step_s), SPEED_BATCH * num_steps
    half = seen.memory[len(seen.memory) // 2 :]
    slope = statistics.linear_regression([second for second, _ in half], [size for _, size in half]).slope

    def resident_mb(memory: Sequence[tuple[float, int]], num_rollouts: int) -> float:
        _, size = min(memory, key=lambda one: abs(one[0] - memory[0][0] - num_rollouts / per_s))
        return round(size / 1e6, 1)

    points = [point for point in MEMORY_POINTS if point <= num]
    return {
        "rollouts": num,
        "rollouts_per_s": round(per_s, 1),
        "cpu_us_per_rollout": round(1e6 * seen.cpu_s / num, 1),
        "worker_cpu_us_per_rollout": round(1e6 * seen.worker_cpu_s / num, 1),
        **lag_figures(seen),
        **{f"resident_mb_at_{point}": resident_mb(seen.memory, point) for point in points},
        "resident_mb": round(seen.memory[-1][1] / 1e6, 1),
        **{f"worker_resident_mb_at_{point}": resident_mb(seen.worker_memory, point) for point in points},
        "worker_resident_mb": round(seen.worker_memory[-1][1] / 1e6, 1),
        "bytes_per_rollout": round(slope / per_s, 1),
    }


def measure_flight(folder: Path) -> dict[str, float]:
    """With many rollouts in flight."""
    seen, step_s, most = measured(
        folder / "run", batch_size=FLIGHT_BATCH, num_steps=FLIGHT_STEPS, delay_s=FLIGHT_DELAY_S
    )
    return {"in_flight": most, "step_s": round(statistics.median(step_s), 2), **lag_figures(seen)}


def measure_ledger(folder: Path) -> dict[str, float]:
    """Measures commands on a ledger with a million rollouts, as an orchestrator writes it."""
    from grpo.orchestrator.ledger import Ledger

    ledger, draw, began_s = Ledger(folder / "ledger.sqlite"), random.Random(0), time.perf_counter()
    for step in range(1, LEDGER_STEPS + 1):
        groups = range((step - 1) * SPEED_BATCH // GROUP_SIZE, step * SPEED_BATCH // GROUP_SIZE)
        for group in groups:
            ledger.issued(group, num=GROUP_SIZE, env="e", example=draw.randrange(NUM_EXAMPLES), version=step - 1)
        ids = [f"{group}/{number}" for group in groups for number in range(GROUP_SIZE)]
        for rollout_id in ids:
            ledger.scored(rollout_id, reward=draw.random(), num_tokens=NUM_TOKENS)
        ledger.dropped(ids[:10], "env_error")
        ledger.shipping(ids[10:], step, state={}, metrics={})()
        ledger.shipped(step)
        ledger.trained(step)
    ledger.close()
    figures = {"write_us_per_rollout": 1e6 * (time.perf_counter() - began_s) / (LEDGER_STEPS * SPEED_BATCH)}
    questions = {"totals": [], "group": ["77777"], "rollout": ["77777/3"], "step": ["500"], "example": ["e/77"]}
    for name, value in questions.items():
        words = [f"--{name}", *value] if value else []
        command = [sys.executable, "-m", "grpo.cli", "ledger", str(folder), *words]
        seconds = []
        for _ in range(3):
            began_s = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - began_s)
        figures[f"{name}_s"] = min(seconds)
    return {name: round(value, 2) for name, value in figures.items()}


def measure_prompts() -> dict[str, float]:
    """Milliseconds of the buffer for a step of 128 groups and the state that goes with it, a fifth being easy."""
    from grpo.orchestrator.buffer import Buffer

    figures = {}
    for num in (10_000, 1_000_000):
        buffer = Buffer({"e": [f"{one:024x}" for one in range(num)]}, seed=1, easy_threshold=1.0)
        times_s = []
        for step in range(51):
            began_s = time.perf_counter()
            for group in range(128 * step, 128 * (step + 1)):
                buffer.issue(group)
                buffer.returned(group, [1.0 if group % 5 == 0 else 0.5])
                buffer.closed(group)
            json.dumps([buffer.state(), buffer.moved(), buffer.metrics()])
            times_s.append(time.perf_counter() - began_s)
        figures[f"ms_of_{num}"] = round(1e3 * statistics.median(times_s), 2)
    return figures | {"issue_p99_ms": round(1e3 * worst_issue_s(1_000_000), 3)}


def worst_issue_s(num: int) -> float:
    """The processor time of an `issue`, 99th percentile, where as many examples are normal as make it slowest."""
    from grpo.orchestrator.buffer import HARD, Buffer

    buffer, worst_s = Buffer({"e": [f"{one:024x}" for one in range(num)]}, seed=1, hard_threshold=0.0), 0.0
    [env] = buffer._environments.values()
    for num_normal in (num, num // 10, num // 100, num // 500, 1025, 1000, 10, 1):
        for number in np.flatnonzero(env.pools == 0)[num_normal:].tolist():
            env.put(number, HARD)
        times_s = []
        for group in range(2000):
            began_s = time.thread_time()
            buffer.issue(group)
            times_s.append(time.thread_time() - began_s)
            buffer.closed(group)
        worst_s = max(worst_s, sorted(times_s)[-20])
    return worst_s


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("what", nargs="*", help="speed, untraced, flight, ledger, prompts (default: all)")
    command.add_argument("--rollouts", type=int, default=250_000, help="of the run for speed (default: 250000)")
    options = command.parse_args()
    figures: dict[str, float] = {}
    for name in options.what or ("speed", "untraced", "flight", "ledger", "prompts"):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            found = {
                "speed": lambda: measure_speed(folder, options.rollouts, traced=True),  # noqa: B023 - called at once
                "untraced": lambda: measure_speed(folder, options.rollouts, traced=False),  # noqa: B023
                "flight": lambda: measure_flight(folder),  # noqa: B023
                "ledger": lambda: measure_ledger(folder),  # noqa: B023
                "prompts": measure_prompts,
            }[name]()
        figures |= {f"{name} {key}": value for key, value in found.items()}
    return report("orchestrator", figures, TARGETS, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
