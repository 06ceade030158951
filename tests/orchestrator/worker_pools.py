"""Pools of environment workers for tests, and what is rolled out in them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from grpo.orchestrator.rollouts.records import Failure, Task
from grpo.orchestrator.workers.pool import WorkerPool
from grpo.orchestrator.workers.protocol import AnyCall, Outcome, Reply, Sample, Sampled, Score
from grpo.orchestrator.workers.server import EnvironmentServer
from grpo.orchestrator.workers.session import Answerer

LIMIT_S = 120.0


class Clock:
    """Stands for the module `time` where a test puts the clock forward instead of waiting."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@contextlib.asynccontextmanager
async def pool_of(
    folder: Path, code: str, name: str, *, served: bool = False, **given: Any
) -> AsyncIterator[WorkerPool]:
    """The workers of a class in `code`, loaded; `served`: by an environment server."""
    path = folder / "environment.py"
    path.write_text(code)
    env_id = f"{path}:{name}"
    async with contextlib.AsyncExitStack() as stack:
        if served:
            given["address"] = (await stack.enter_async_context(serving(env_id))).address
        yield await stack.enter_async_context(pool_for(env_id, **given))


@contextlib.asynccontextmanager
async def pool_for(env_id: str, **given: Any) -> AsyncIterator[WorkerPool]:
    """The workers of an environment, loaded."""
    told: dict[str, Any] = {"label": "e", "env_id": env_id, "args": {}, "timeout_s": 60.0, **given}
    pool = WorkerPool(**told)
    try:
        await pool.load()
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def serving(env_id: str, port: int = 0) -> AsyncIterator[EnvironmentServer]:
    """A server of environments in this process."""
    server = EnvironmentServer(env_id, "127.0.0.1", port)
    running = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await server.close()


async def scored(pool: WorkerPool, completion: str, prompt: str = "hi") -> Outcome | Failure:
    """A single answer's outcome."""
    async with asyncio.timeout(LIMIT_S):
        [outcome] = await pool.score(scoring(completion, prompt=prompt), begin=lambda place: says())
        return outcome


def scoring(*completions: str, prompt: str = "hi") -> Score:
    """Asks for the scores of single answers."""
    num = len(completions)
    return Score(
        split="train",
        index=0,
        prompt=[{"role": "user", "content": prompt}],
        texts=list(completions),
        finish_reasons=["stop"] * num,
        num_tokens=[1] * num,
        seeds=[0] * num,
    )


async def rolled_out(pool: WorkerPool, *texts: str, prompt: str = "hi") -> Outcome | Failure:
    """What comes of an episode whose policy says `texts`, and then `fine`."""
    async with asyncio.timeout(LIMIT_S):
        return await pool.run(task(prompt), seed=0, begin=lambda: says(*texts))


def task(prompt: str = "hi", index: int = 0) -> Task:
    return Task(env="e", split="train", index=index, messages=({"role": "user", "content": prompt},))


def says(*texts: str, seen: list[AnyCall] | None = None, wait: Callable[[], Any] | None = None) -> Answerer:
    """A model that gives these answers, then `fine`; `wait` is awaited before each."""
    left = list(texts)

    async def answer(call: AnyCall) -> Reply:
        if seen is not None:
            seen.append(call)
        if wait is not None:
            await wait()
        assert isinstance(call, Sample)
        text = left.pop(0) if left else "fine"
        return Sampled(job=call.job, call=call.call, text=text, finish_reason="stop", num_tokens=1)

    return answer


def reason(outcome: Outcome | Failure) -> str:
    """Why it failed; empty where it did not."""
    return outcome.reason if isinstance(outcome, Failure) else ""
