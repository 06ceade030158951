"""Measures what bad code of an environment costs the rollouts beside it.

    python -m benchmarks.workers [--check]

No servers and no trainer: 1,000 rollouts in flight in eight workers, each of which waits 2 to 6 seconds for its answer
and is then scored by a plain function and by an `async` judge of 0.2 s. One in a hundred raises, hangs or exits. The
figure is how many good rollouts end a second, against those of a run in which all are good, less the share of all
places that bad rollouts held: one that hangs holds its own until its deadline, which is no cost to the others.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.engine import RolloutEngine
from grpo.orchestrator.rollouts.records import Group, SamplingParams, Task
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.transport.http import Choice

from benchmarks.report import parser, report
from grpo import Environment, EpisodeState, MultiTurnEpisode, RolloutContext, Rubric

NUM_WORKERS, NUM_IN_FLIGHT, ONE_IN = 8, 1000, 100
WARM_UP_S, SECONDS, TIMEOUT_S = 30.0, 25.0, 20.0
KINDS = ("raise", "hang", "exit")
MAX_COST = 0.02


def plain(completion: str) -> float:
    """Raises or exits, where the answer says so."""
    if completion == "raise":
        raise RuntimeError("bad")
    if completion == "exit":
        os._exit(3)
    return 1.0


async def judge(completion: str) -> float:
    """Takes its time, or hangs."""
    await asyncio.sleep(1000 if completion == "hang" else 0.2)
    return 1.0


class Judged(MultiTurnEpisode, Environment):
    """One answer, for which the code of the rollout waits."""

    rubric = Rubric([plain, judge])

    def dataset(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"prompt": "hi"}]

    async def respond(self, state: EpisodeState, ctx: RolloutContext) -> None:
        return None


class SlowServer:
    """Answers after a while; one answer in a hundred is `bad`."""

    def __init__(self, bad: str) -> None:
        self._bad, self._numbers, self._draw = bad, itertools.count(1), random.Random(0)

    async def generate(self, prompt: Sequence[int], **_: Any) -> list[Choice]:
        text = self._bad if next(self._numbers) % ONE_IN == 0 else "fine"
        await asyncio.sleep(self._draw.uniform(2.0, 6.0))
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        return [Choice(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason="stop")]


async def measure(bad: str) -> tuple[float, float]:
    """Good rollouts that end a second after a warm-up, and the share of all places that bad ones held."""
    env_id = f"{__file__}:Judged"
    pool = WorkerPool(label="judged", env_id=env_id, args={}, timeout_s=TIMEOUT_S, num_workers=NUM_WORKERS)
    [messages] = await pool.prompts("train")
    renderer = ChatRenderer.of_model(Path("configs/quickstart/model"))
    engine = RolloutEngine({"judged": pool}, cast(Any, SlowServer(bad)), renderer, context_len=512, seed=0)
    task = Task(env="judged", split="train", index=0, messages=messages)
    params, numbers = SamplingParams(temperature=1.0, max_tokens=16), itertools.count()
    num_good, held_s = 0, 0.0
    since_s = time.monotonic() + WARM_UP_S

    async def keep_busy() -> None:
        nonlocal num_good, held_s
        while True:
            start_s = time.monotonic()
            group = Group(task=task, id=str(next(numbers)), num=1, version=0, params=params)
            [result] = await engine.run_group(group)
            if time.monotonic() >= since_s:
                num_good += result.failure is None
                held_s += 0.0 if result.failure is None else time.monotonic() - start_s

    running = [asyncio.create_task(keep_busy()) for _ in range(NUM_IN_FLIGHT)]
    await asyncio.sleep(WARM_UP_S + SECONDS)
    found = num_good / SECONDS, held_s / (NUM_IN_FLIGHT * SECONDS)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await pool.close()
    return found


def main() -> int:
    """The command."""
    options = parser(__doc__).parse_args()
    found = {kind: asyncio.run(measure(kind)) for kind in ("fine", *KINDS)}
    figures = {f"{kind} good_per_s": rate for kind, (rate, _) in found.items()}
    figures |= {f"{kind} held": found[kind][1] for kind in KINDS}
    figures |= {f"{kind} cost": 1 - found[kind][0] / found["fine"][0] / (1 - found[kind][1]) for kind in KINDS}
    return report("workers", figures, {f"{kind} cost": ("<=", MAX_COST) for kind in KINDS}, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
