"""The real orchestrator, its workers, ledger, traces and batches, with a simulated cluster of inference servers.

    python -m benchmarks.cluster [--servers 32] [--sequences 1000] [--minutes 10] [--speed 1] [--check]

Each server decodes `--sequences` answers at once, 30 tokens a second each, `--speed` times as fast. Answers have
log-normal lengths up to 32,768 tokens, and come over HTTP as grpo-infer sends them. Half of the groups are single
answers, which an async judge of 0.2 s scores; the others are conversations with a tool, which returns 3 MB once in 50
turns. Two servers a minute are lost with all their answers and come back after 20 s. A trainer receives the batches.

Orchestrator and workers share the machine with the stand-ins: with few cores, lag is that of the machine too. Growth of
memory is that of the median from the second to the last third of the time: it says something once the longest answers
have come, after 18 minutes divided by `--speed`, and some times that where servers are lost with them.
`--check` exits 1 where a target is missed. The last line is one JSON object.
"""

import asyncio
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop
from grpo.transport.limits import raise_file_limit
from grpo.transport.records import MESSAGE_TYPE

from benchmarks.orchestrator import PROBE_S, Forgetful, use_of_workers
from benchmarks.report import parser, report
from grpo import Environment, EpisodeState, MultiTurnEpisode, RolloutContext, Rubric

LONGEST, MEDIAN, MEDIAN_TURN, SIGMA, TOKENS_PER_S = 32_768, 4096, 256, 1.0, 30.0
SEQ_LEN, GROUP, TURN_TOKENS = 40_960, 16, 2048
WITH_TOOLS = "With tools"
LOST_EVERY_S, AWAY_S, JUDGE_S = 30.0, 20.0, 0.2
TARGETS = {
    "lag_p99_ms": ("<=", 50.0),
    "lag_p99_of_last_third_ms": ("<=", 50.0),
    "orchestrator_share": ("<=", 1.0),
    "resident_growth": ("<=", 1.05),
}


def prompts(title: str) -> Sequence[Mapping[str, Any]]:
    """Ten thousand examples."""
    return [{"prompt": f"{title} {number}: " + "what follows? " * 20} for number in range(10_000)]


async def judge(completion: str) -> float:
    """Takes as long as a model that is asked."""
    await asyncio.sleep(JUDGE_S)
    return float(len(completion) % 2)


class Judged(Environment):
    """Single answers."""

    rubric = Rubric([judge])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return prompts("Question")


class Tools(MultiTurnEpisode, Environment):
    """Conversations of three answers; the tool says 3 MB once in 50 turns, which no context holds."""

    rubric = Rubric([judge])

    def __init__(self) -> None:
        super().__init__(max_turns=3)

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return prompts(WITH_TOOLS)

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> str:
        return "word " * (600_000 if random.random() < 0.02 else 400)


def stand_in(folder: str, num_servers: int, sequences: int, speed: float, connection: Connection) -> None:
    """Runs the servers and the trainer; sends the servers' addresses, and when asked what they have seen."""
    raise_file_limit()
    from aiohttp import web

    from tests.orchestrator.fakes import FakeServer, FakeTrainer

    draw = random.Random(0)
    ids = np.random.default_rng(0).integers(97, 123, LONGEST).astype("<i4").tobytes()
    logprobs = (-np.random.default_rng(1).random(LONGEST)).astype("<f4").tobytes()
    seen = {"in_flight": 0, "most_in_flight": 0, "answers": 0, "tokens": 0, "lost": 0}

    class Decoding(FakeServer):
        async def _generate(self, request: web.Request) -> web.Response:
            asked = json.loads(await request.read())
            if (version := asked["version"]) not in self.live:
                return web.json_response({"error": {"type": "not_live", "message": "not live"}}, status=404)
            is_turn = WITH_TOOLS.encode() in bytes(one for one in asked["prompt_token_ids"][:64] if one < 256)
            most, median = (TURN_TOKENS, MEDIAN_TURN) if is_turn else (asked["max_tokens"], MEDIAN)
            lengths = [
                min(most, asked["max_tokens"], 1 + int(draw.lognormvariate(math.log(median), SIGMA)))
                for _ in range(asked["n"])
            ]
            seen["in_flight"] += len(lengths)
            seen["most_in_flight"] = max(seen["most_in_flight"], seen["in_flight"])
            try:
                await asyncio.sleep(max(lengths) / (TOKENS_PER_S * speed))
            finally:
                seen["in_flight"] -= len(lengths)
            seen["answers"], seen["tokens"] = seen["answers"] + len(lengths), seen["tokens"] + sum(lengths)
            choices = [
                {"token_ids": ids[: 4 * num], "logprobs": logprobs[: 4 * num], "finish_reason": "length"}
                for num in lengths
            ]
            body = msgspec.msgpack.encode({"version": version, "choices": choices})
            return web.Response(body=body, content_type=MESSAGE_TYPE)

    async def lose(servers: Sequence[FakeServer]) -> None:
        while True:
            await asyncio.sleep(LOST_EVERY_S - AWAY_S)
            lost = draw.choice(servers)
            await lost.stop()
            seen["lost"] += 1
            await asyncio.sleep(AWAY_S)
            await lost.start()

    async def serve() -> None:
        # One after the other: a port that is found free is taken before the next one is looked for.
        servers = [await Decoding(max_model_len=SEQ_LEN).start() for _ in range(num_servers)]
        trainer = FakeTrainer(Path(folder), settings={"sequence_len": SEQ_LEN}, sequence_len=SEQ_LEN, idle_s=3600.0)
        trainer.batches = Forgetful()
        trainer.start()
        connection.send([server.url for server in servers])
        losing = asyncio.create_task(lose(servers)) if num_servers > 1 else None
        await asyncio.to_thread(connection.recv)
        connection.send(seen)
        del losing

    uvloop.run(serve())


def orchestrate_for(settings: dict[str, Any], seconds: float, connection: Connection) -> None:
    """Runs the program for so long from its first batch on, and sends what was seen."""
    from grpo.configs.orch import OrchSettings
    from grpo.orchestrator.run import orchestrate

    lags_s, memory = list[float](), list[int]()
    first = Path(settings["output_dir"]) / "metrics.jsonl"

    async def run() -> dict[str, float]:
        running = asyncio.create_task(orchestrate(OrchSettings.model_validate(settings)))
        while not (first.exists() and first.stat().st_size):
            await asyncio.wait([running], timeout=0.1)
            if running.done():
                running.result()
        process, began_s = psutil.Process(), time.perf_counter()
        used_s, loop_s, (workers_s, _) = time.process_time(), time.thread_time(), use_of_workers()
        while (elapsed_s := time.perf_counter() - began_s) < seconds and not running.done():
            asked_s = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            lags_s.append(time.perf_counter() - asked_s - PROBE_S)
            memory.append(process.memory_info().rss)
        used_s, loop_s = time.process_time() - used_s, time.thread_time() - loop_s
        now_s, worker_bytes = use_of_workers()
        running.cancel()
        await asyncio.wait([running])
        lags_ms = sorted(1e3 * lag for lag in lags_s)
        thirds = [slice(len(memory) * part // 3, len(memory) * (part + 1) // 3) for part in range(3)]
        of_thirds = [statistics.median(memory[third]) for third in thirds]
        return {
            "seconds": round(elapsed_s, 1),
            "loop_share": round(loop_s / elapsed_s, 3),
            "orchestrator_share": round(used_s / elapsed_s, 3),
            "workers_share": round((now_s - workers_s) / elapsed_s, 3),
            "lag_p50_ms": round(lags_ms[len(lags_ms) // 2], 2),
            "lag_p99_ms": round(lags_ms[int(0.99 * len(lags_ms))], 1),
            "lag_max_ms": round(lags_ms[-1], 1),
            "lag_p99_of_last_third_ms": round(1e3 * statistics.quantiles(lags_s[thirds[2]], n=100)[98], 1),
            "resident_mb": round(memory[-1] / 1e6),
            "resident_growth": round(of_thirds[2] / of_thirds[1], 3),
            "most_resident_mb": round(max(memory) / 1e6),
            "workers_resident_mb": round(worker_bytes / 1e6),
        }

    connection.send(uvloop.run(run()))


def measured(folder: Path, *, num_servers: int, sequences: int, minutes: float, speed: float) -> dict[str, float]:
    """Returns the figures of one cluster."""
    from tests.orchestrator.fakes import settings_for

    context = multiprocessing.get_context("spawn")
    stubs, theirs = context.Pipe()
    stub = context.Process(target=stand_in, args=(str(folder), num_servers, sequences, speed, theirs), daemon=True)
    stub.start()
    theirs.close()
    urls = stubs.recv()
    in_flight = num_servers * sequences // GROUP * GROUP
    batch = max(GROUP, min(1024, in_flight // 4) // GROUP * GROUP)
    envs = [{"id": f"{Path(__file__)}:{name}", "name": name.lower()} for name in ("Judged", "Tools")]
    settings = settings_for(
        folder,
        env=envs,
        client={"base_url": urls, "timeout": 7200},
        batch_size=batch,
        rollouts_per_example=GROUP,
        seq_len=SEQ_LEN,
        max_steps=100_000,
        max_async_level=1,
        max_off_policy_steps=64,
        oversampling_factor=min(100.0, in_flight / batch),
        max_concurrent_groups=in_flight // GROUP,
        sampling={"max_tokens": LONGEST},
        eval={"num_examples": 0},
    ).model_dump(mode="json", exclude_unset=True)
    ours, its = context.Pipe()
    program = context.Process(target=orchestrate_for, args=(settings, 60 * minutes, its))
    program.start()
    its.close()
    try:
        wait([ours, stub.sentinel])
        figures: dict[str, float] = ours.recv()
        stubs.send(None)
        seen = stubs.recv()
    finally:
        for process in (program, stub):
            process.terminate()
            process.join()
    on_disk = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return figures | {
        "most_in_flight": seen["most_in_flight"],
        "answers": seen["answers"],
        "answered_tokens": seen["tokens"],
        "servers_lost": seen["lost"],
        "disk_mb": round(on_disk / 1e6, 1),
    }


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--servers", default="32", help="numbers of servers, one run each (default: 32)")
    command.add_argument("--sequences", type=int, default=1000, help="that a server decodes at once (default: 1000)")
    command.add_argument("--minutes", type=float, default=10.0, help="of each run, from its first batch on")
    command.add_argument("--speed", type=float, default=1.0, help="times as fast as 30 tokens a second")
    options = command.parse_args()
    figures: dict[str, float] = {}
    sizes = [int(size) for size in options.servers.split(",")]
    for size in sizes:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found = measured(
                Path(folder) / "run",
                num_servers=size,
                sequences=options.sequences,
                minutes=options.minutes,
                speed=options.speed,
            )
        figures |= {key if len(sizes) == 1 else f"{size} servers {key}": value for key, value in found.items()}
    targets = {name: TARGETS[name.rpartition(" ")[2]] for name in figures if name.rpartition(" ")[2] in TARGETS}
    return report("cluster", figures, targets, check=options.check)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
