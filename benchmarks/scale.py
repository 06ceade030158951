"""One orchestrator and 1 to 1,000 servers, 100,000 rollouts in flight, on a simulated clock and network.

    python -m benchmarks.scale [--servers 1,10,100,1000] [--steps 10] [--picture docs/pictures/scale.png]
    python -m benchmarks.scale --servers 32 --league 1000 --opponents 0,1,2,4,8

The scheduler, the inference client, the server pool, the watch over servers and the weight sync are the real ones, with
the records that they encode and decode. Simulated are the network, servers and trainer. A server decodes `SLOTS`
sequences at once and keeps others waiting; an answer's length is log-normal, at most `LONGEST`. Versions are fetched by
every server from one store, which has `STORE_BYTES_PER_S` for all together. A server dies every `LIFE_S` / servers
seconds, loses all its answers, and comes back after `AWAY_S` with no version.

Waiting takes no real time: the loop's clock jumps to the next event. The processor time of this process is added to
that clock, so that an orchestrator that is too slow for its servers shows as servers that wait. Shares leave
out the first and the last two steps. The last line is one JSON object.

With `--league` the run has had so many versions before. Each version's games meet so many of them, drawn anew, which
servers load and prove before it is live; a game has an answer of each side, as long as one of the policy.
"""

import argparse
import asyncio
import gc
import json
import logging
import math
import random
import selectors
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
from grpo.orchestrator.inference.client import PolicyClient
from grpo.orchestrator.inference.pool import ServerPool
from grpo.orchestrator.inference.watch import ServerWatch
from grpo.orchestrator.inference.weight_sync import WeightSync
from grpo.orchestrator.rollouts.records import SamplingParams
from grpo.orchestrator.scheduler import Scheduler
from grpo.transport.http import CanaryFigures, Choice, Generated, LoadReport, ServerInfo, ServerLoad, Unloaded
from grpo.transport.records import MESSAGE_TYPE, to_body

SLOTS, GROUP, GROUPS_A_SERVER = 64, 16, 7
"""Sequences that a server decodes at once; rollouts of a group; groups in flight for each server."""
TOKENS_PER_S, MEDIAN_TOKENS, SIGMA, LONGEST = 40.0, 400, 0.8, 4096
ADAPTER_BYTES, STORE_BYTES_PER_S, CARD_BYTES_PER_S, PROOF_S = 80e6, 5e9, 1.25e9, 0.3
LIFE_S, AWAY_S, HEALTH_S = 20_000.0, 120.0, 10.0
FIRST_STEPS, LAST_STEPS = 2, 2
"""Steps that are left out: while the pipeline fills, and while it empties."""
MODES = ((1, 1.25), (1, 1.0), (0, 1.0), (2, 1.5))
"""(max_async_level, oversampling_factor); the first one for all numbers of servers."""
PROMPT = list(range(64))


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event, and has the processor time of the process beside that."""

    def __init__(self) -> None:
        self.jumped_s, self._began_s = 0.0, time.process_time()
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.jumped_s + time.process_time() - self._began_s


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self._loop.jumped_s += timeout
        return super().select(0)


@dataclass(eq=False)
class Server:
    """One server: sequences that it decodes, others that wait, and what it has loaded."""

    url: str
    rng: random.Random
    free: int = SLOTS
    waiting: deque["asyncio.Future[None]"] = field(default_factory=deque)
    worked_s: float = 0.0
    live: set[int] = field(default_factory=set)
    lives: int = 0
    """Number of the life that it is in; None of its earlier ones' requests is answered."""
    is_there: bool = True

    async def answer(self) -> None:
        """Samples one answer, once there is room."""
        if self.free == 0:
            self.waiting.append(turn := asyncio.get_running_loop().create_future())
            await turn
        else:
            self.free -= 1
        seconds = min(LONGEST, self.rng.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)) / TOKENS_PER_S
        try:
            await asyncio.sleep(seconds)
            self.worked_s += seconds
        finally:
            while self.waiting and self.waiting[0].done():
                self.waiting.popleft()
            if self.waiting:
                self.waiting.popleft().set_result(None)
            else:
                self.free += 1


class Network:
    """Stands for the client's HTTP session."""

    def __init__(self, num_servers: int) -> None:
        self.servers = {f"http://s{n}": Server(f"http://s{n}", random.Random(n)) for n in range(num_servers)}
        self.num_loading = 0
        tokens = [*range(int(MEDIAN_TOKENS * math.exp(SIGMA**2 / 2)))]
        logprobs = np.full(len(tokens), -0.123456789, np.float32)
        choice = Choice(token_ids=np.array(tokens, np.int32), logprobs=logprobs, finish_reason="stop")
        self.choices = [choice] * GROUP
        self._bodies: dict[int, bytes] = {}

    @asynccontextmanager
    async def request(self, method: str, url: str, data: bytes | None = None) -> AsyncIterator[Any]:
        """An answer with `status` and `read`."""
        base, _, path = url.partition("/policy/")
        server = self.servers[base]
        await asyncio.sleep(0.001)
        status, content = await self._answered(server, path, data)
        yield SimpleNamespace(status=status, read=_returns(content), content_type=MESSAGE_TYPE)

    async def _answered(self, server: Server, path: str, data: bytes | None) -> tuple[int, bytes]:
        life = server.lives
        if not server.is_there:
            raise aiohttp.ClientConnectionError("nobody is there")
        if path == "info":
            load = ServerLoad(num_running=SLOTS - server.free, num_waiting=len(server.waiting), kv_use=0.5)
            live = dict.fromkeys(server.live, "s")
            info = ServerInfo(base_model="m", max_model_len=8192, max_lora_rank=16, run_id="r", live=live, load=load)
            return 200, to_body(info, MESSAGE_TYPE)
        asked = msgspec.json.decode(data or b"{}")
        version = asked["version"]
        if path == "load":
            await self._fetch()
            server.live.add(version)
            canary = CanaryFigures(max_abs=0.0, mean_abs=0.0, base_max_abs=0.0, base_mean_abs=0.0, tolerance=1.0)
            report = LoadReport(version=version, name="p", snapshot="s", canary=canary, load_s=0.0, canary_s=0.0)
            return self._unless_dead(server, life, to_body(report, MESSAGE_TYPE))
        if path == "unload":
            server.live.discard(version)
            return 200, to_body(Unloaded(version=version, in_flight=0), MESSAGE_TYPE)
        if version not in server.live:
            return 409, b'{"error": {"type": "not_live", "message": "it is not loaded"}}'
        await asyncio.gather(*(server.answer() for _ in range(GROUP)))
        if version not in self._bodies:
            self._bodies[version] = to_body(Generated(version=version, choices=self.choices), MESSAGE_TYPE)
        return self._unless_dead(server, life, self._bodies[version])

    def _unless_dead(self, server: Server, life: int, content: bytes) -> tuple[int, bytes]:
        if server.lives != life or not server.is_there:
            raise aiohttp.ClientConnectionError("it has died")
        return 200, content

    async def _fetch(self) -> None:
        """Waits as long as the store needs for all servers that fetch now."""
        self.num_loading += 1
        await asyncio.sleep(0)
        await asyncio.sleep(ADAPTER_BYTES / min(CARD_BYTES_PER_S, STORE_BYTES_PER_S / self.num_loading) + PROOF_S)
        self.num_loading -= 1

    async def kill(self) -> None:
        """Servers die, and come back."""
        rng, loop = random.Random(0), asyncio.get_running_loop()
        while True:
            await asyncio.sleep(rng.expovariate(len(self.servers) / LIFE_S))
            server = rng.choice(list(self.servers.values()))
            server.is_there, server.lives, server.live = False, server.lives + 1, set()
            loop.call_later(AWAY_S, setattr, server, "is_there", True)

    async def close(self) -> None:
        """Does nothing; sessions of aiohttp have it."""


def _returns(content: bytes) -> Any:
    async def read() -> bytes:
        return content

    return read


@dataclass
class Simulation:
    """One run."""

    num_servers: int
    num_steps: int
    level: int
    oversampling: float
    train_s: float
    players: int = 0
    """Versions before the run's first, whom games meet."""
    opponents: int = 0
    """How many of them the games of one version meet."""
    trained_s: float = 0.0
    lags: list[int] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    most_in_flight: int = 0
    most_adapters: int = 0
    num_loads: int = 0
    num_done: int = 0
    num_failed: int = 0

    async def run(self) -> dict[str, float]:
        """The figures."""
        loop, network = asyncio.get_running_loop(), Network(self.num_servers)
        self.client = PolicyClient(ServerPool(list(network.servers)), api_key=None, timeout_s=1e6)
        await self.client.close()
        self.client._session = self.client._control_session = network  # type: ignore[assignment]
        self.sync = WeightSync(self.client, alias="default")
        groups = GROUPS_A_SERVER * self.num_servers
        self.scheduler = Scheduler(
            groups_per_batch=groups,
            max_async_level=self.level,
            max_off_policy_steps=8,
            max_in_flight=math.ceil(groups * self.oversampling),
            max_steps=self.players + self.num_steps,
            oversampling_factor=self.oversampling,
            shipped=self.players,
        )
        self.shipped: asyncio.Queue[int] = asyncio.Queue()
        watch = ServerWatch(self.sync, interval_s=HEALTH_S, timeout_s=30.0)
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(watch.run()), group.create_task(self._sample(group))]
            background += [group.create_task(network.kill())] if self.num_servers > 1 else []
            await self.sync.wait_for_servers()
            marks: list[tuple[float, float, float, float, int]] = []

            def mark() -> None:
                worked_s = sum(server.worked_s for server in network.servers.values())
                marks.append((loop.time(), worked_s, self.trained_s, time.process_time(), self.num_done))

            for step in range(self.num_steps + 1):
                if step:
                    await self.shipped.get()
                    await asyncio.sleep(self.train_s)
                    self.trained_s += self.train_s
                if step in (FIRST_STEPS, self.num_steps - LAST_STEPS):
                    mark()
                if step < self.num_steps:
                    since_s, version = loop.time(), self.players + step
                    await self._load_opponents(version)
                    await self.sync.load(version)
                    self.loads_s.append(loop.time() - since_s)
                    self.most_adapters = max(self.most_adapters, len(self.sync.snapshots))
                    self.scheduler.version_live(version)
                    await self.sync.keep_only(self.scheduler.pinned())
            for task in background:
                task.cancel()
        await self.client.close()
        first, last = marks
        elapsed_s, worked_s, trained_s, used_s, done = (b - a for a, b in zip(first, last, strict=True))
        return {
            "servers_busy": worked_s / (elapsed_s * SLOTS * self.num_servers),
            "trainer_busy": trained_s / elapsed_s,
            "orchestrator_busy": used_s / elapsed_s,
            "ms_a_group": 1000 * used_s / max(1, done),
            "step_s": elapsed_s / (self.num_steps - FIRST_STEPS - LAST_STEPS),
            "lag_mean": sum(self.lags) / len(self.lags),
            "lag_max": float(max(self.lags)),
            "load_s": sorted(self.loads_s)[len(self.loads_s) // 2],
            "in_flight": float(self.most_in_flight * GROUP),
            "failed": float(self.num_failed),
            "most_adapters": float(self.most_adapters),
            "loads_a_step": self.num_loads / self.num_steps,
            "memory_mb": psutil.Process().memory_info().rss / 1e6,
        }

    async def _load_opponents(self, version: int) -> None:
        drawn = random.Random(version).sample(range(version), self.opponents)
        self.scheduler.meets(version, drawn)
        new = [one for one in drawn if one not in self.sync.snapshots]
        for opponent in new:
            await self.sync.load(opponent)
        self.num_loads += 1 + len(new)

    async def _sample(self, group: asyncio.TaskGroup) -> None:
        while not self.scheduler.finished:
            while (number := self.scheduler.start()) is not None:
                group.create_task(self._roll_out(number, self.scheduler.live or 0))
                self.most_in_flight = max(self.most_in_flight, self.scheduler.num_in_flight)
            while (shipment := self.scheduler.ship()) is not None:
                self.lags += [shipment.lag(number) for number in shipment.versions]
                self.shipped.put_nowait(shipment.step)
            await self.scheduler.changed.wait()

    async def _roll_out(self, number: int, version: int) -> None:
        params = SamplingParams(temperature=1.0, max_tokens=LONGEST)
        try:
            await self.client.generate(PROMPT, params=params, num=GROUP, version=version, seed=number)
            if self.players:
                drawn = sorted(self.scheduler.opponents_of(version)) or [version]
                other = drawn[number % len(drawn)]
                await self.client.generate(PROMPT, params=params, num=GROUP, version=other, seed=number)
        except Exception:
            self.num_failed += 1
            self.scheduler.failed(number)
            raise
        self.num_done += 1
        self.scheduler.completed(number)


def simulated_ms(num_groups: int = 1000) -> float:
    """Processor time of the simulated network and servers for one group, in milliseconds."""

    async def run() -> float:
        network, body = Network(10), b'{"version": 0}'
        for server in network.servers.values():
            server.live.add(0)

        async def ask(url: str) -> None:
            async with network.request("POST", f"{url}/policy/generate", data=body) as answer:
                await answer.read()

        urls, began_s = list(network.servers), time.process_time()
        await asyncio.gather(*(ask(urls[number % 10]) for number in range(num_groups)))
        return 1000 * (time.process_time() - began_s) / num_groups

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


def simulate(
    num_servers: int, num_steps: int, mode: tuple[int, float], *, players: int = 0, opponents: int = 0
) -> dict[str, float]:
    """The figures of a run whose trainer takes as long as its servers at their best."""
    mean_s = MEDIAN_TOKENS * math.exp(SIGMA**2 / 2) / TOKENS_PER_S * (2 if players else 1)
    train_s = GROUPS_A_SERVER * GROUP * mean_s / SLOTS
    simulation = Simulation(num_servers, num_steps, *mode, train_s, players, opponents)
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(simulation.run())


def rows(sizes: list[int], num_steps: int) -> Iterator[tuple[int, tuple[int, float], dict[str, float]]]:
    """Servers, mode and figures, smallest first."""
    for size in sizes:
        yield size, MODES[0], simulate(size, num_steps, MODES[0])
    for mode in MODES[1:]:
        yield min(sizes[-1], 100), mode, simulate(min(sizes[-1], 100), num_steps, mode)


def picture(found: list[tuple[int, tuple[int, float], dict[str, float]]], path: Path) -> None:
    """Draws who is busy, and what the orchestrator takes for a group, over the number of servers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    one = [(size, figures) for size, mode, figures in found if mode == MODES[0]]
    for key in ("servers_busy", "trainer_busy", "orchestrator_busy"):
        left.semilogx(
            [size for size, _ in one], [figures[key] for _, figures in one], "o-", label=key.replace("_", " ")
        )
    right.loglog([size for size, _ in one], [figures["ms_a_group"] for _, figures in one], "o-", label="ms a group")
    right.loglog(
        [size for size, _ in one], [figures["load_s"] for _, figures in one], "o-", label="s to load a version"
    )
    for axis in (left, right):
        axis.set_xlabel("servers")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints a table and, last, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="1,10,100,1000")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--league", type=int, help="versions before the first, whom games meet")
    parser.add_argument("--opponents", default="0,1,2,4,8", help="with --league: how many the games of a version meet")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    gc.freeze()
    gc.set_threshold(5_000, 200, 20)  # as the orchestrator does
    if options.league:
        for size in map(int, options.servers.split(",")):
            for num in map(int, options.opponents.split(",")):
                figures = simulate(size, options.steps, MODES[0], players=options.league, opponents=num)
                print(json.dumps({"servers": size, "opponents": num, **figures}), flush=True)
        return
    found, overhead_ms = [], simulated_ms()
    print(f"the simulation itself takes {overhead_ms:.2f} ms a group, which ms_a_group leaves out")
    for size, mode, figures in rows([int(one) for one in options.servers.split(",")], options.steps):
        figures["ms_a_group"] -= overhead_ms
        found.append((size, mode, figures))
        print(size, *mode, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    if options.picture is not None:
        picture(found, options.picture)
    print(json.dumps([{"servers": size, "mode": mode, **figures} for size, mode, figures in found]))


if __name__ == "__main__":
    main()
