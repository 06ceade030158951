"""What bad code of an environment costs the rollouts beside it.

    python -m benchmarks.workers [raise] [hang] [exit] [--workers N] [--seconds S] [--check]

No servers and no trainer: 1,000 rollouts in flight in `--workers`, each of which waits 2 to 6 seconds for its answer
and is then scored by a plain function and by an `async` judge of 0.2 s. One in a hundred is bad. The figure is how many
good rollouts end a second, against those of a run in which all are good, less the share of all places that bad rollouts
held: one that hangs holds its own until its deadline, which is `held`, and no cost to the others beside it.

The last line is one JSON object. `--check` exits 1 where bad rollouts cost the others 2% or more.
"""

import asyncio
import itertools
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.report import parser, report
from grpo import Environment, EpisodeState, MultiTurnEpisode, RolloutContext, Rubric
from orchestrator.renderer import ChatRenderer
from orchestrator.rollouts.engine import Group, RolloutEngine
from orchestrator.rollouts.records import SamplingParams, Task
from orchestrator.workers.pool import WorkerPool
from transport.http import Choice

MODEL = Path("configs/quickstart/model")
NUM_IN_FLIGHT, ONE_IN, WARM_UP_S, TIMEOUT_S = 1000, 100, 30.0, 20.0
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
    """Answers after a while; one answer in a hundred is bad."""

    def __init__(self, kind: str | None) -> None:
        self._kind, self._numbers, self._draw = kind, itertools.count(1), random.Random(0)

    async def generate(self, prompt: Sequence[int], *, params: SamplingParams, num: int, **_: Any) -> list[Choice]:
        number, wait_s = next(self._numbers), self._draw.uniform(2.0, 6.0)
        await asyncio.sleep(wait_s)
        text = self._kind if self._kind and number % ONE_IN == 0 else "fine"
        return [Choice(token_ids=[*text.encode()], logprobs=[0.0] * len(text), finish_reason="stop")]


async def measure(kind: str | None, seconds: float, num_workers: int) -> dict[str, float]:
    """Good rollouts a second, the share of all places that bad ones held, and workers that died."""
    pool = WorkerPool(
        label="judged", env_id=f"{__file__}:Judged", args={}, timeout_s=TIMEOUT_S, num_workers=num_workers
    )
    [prompt] = await pool.prompts("train")
    engine = RolloutEngine(
        {"judged": pool}, cast(Any, SlowServer(kind)), ChatRenderer.of_model(MODEL), context_len=512, seed=0
    )
    task = Task(env="judged", split="train", index=0, messages=prompt)
    params, numbers = SamplingParams(temperature=1.0, max_tokens=16), itertools.count()
    good, bad = list[tuple[float, float]](), list[tuple[float, float]]()

    async def keep_busy() -> None:
        while True:
            group = Group(task=task, id=str(next(numbers)), num=1, version=0, params=params)
            start_s = time.monotonic()
            [result] = await engine.run_group(group)
            (good if result.failure is None else bad).append((start_s, time.monotonic()))

    running = [asyncio.create_task(keep_busy()) for _ in range(NUM_IN_FLIGHT)]
    since_s = time.monotonic() + WARM_UP_S
    await asyncio.sleep(WARM_UP_S + seconds)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await pool.close()
    num = sum(since_s <= end_s < since_s + seconds for _, end_s in good)
    held_s = sum(end_s - start_s for start_s, end_s in bad if since_s <= end_s < since_s + seconds)
    return {
        "good_per_s": round(num / seconds, 1),
        "held": held_s / (NUM_IN_FLIGHT * seconds),
        "failed": len(bad),
        "restarted": pool.num_restarted,
    }


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("kinds", nargs="*", help=f"{', '.join(KINDS)} (default: all)")
    command.add_argument("--workers", type=int, default=8, help="as env[].num_workers (default: 8)")
    command.add_argument("--seconds", type=float, default=40.0, help="of each measurement (default: 40)")
    options = command.parse_args()
    figures: dict[str, float] = {}
    for kind in ("none", *(options.kinds or KINDS)):
        found = asyncio.run(measure(None if kind == "none" else kind, options.seconds, options.workers))
        figures |= {f"{kind} {key}": value for key, value in found.items()}
        figures[f"{kind} cost"] = 1 - found["good_per_s"] / (figures["none good_per_s"] * (1 - found["held"]))
    targets = {f"{kind} cost": ("<=", MAX_COST) for kind in KINDS}
    return report("workers", figures, targets, check=options.check)


if __name__ == "__main__":
    raise SystemExit(main())
