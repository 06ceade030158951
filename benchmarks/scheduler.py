"""The scheduler in a simulated run with a thousand servers: how busy it keeps them and the trainer, on a fake clock.

    python -m benchmarks.scheduler [--check] [--servers N]

`orchestrator.scheduler.Scheduler` itself decides; servers, trainer and loading are events on a heap. A server works at
one group at a time; how long one takes is log-normal, with a 99th percentile of ten times the median, and at most
8,192 / 600 times it, as lengths are in benchmarks/packing.py. A batch has two groups for each server.
Efficiency is the ideal time divided by the simulated one, between filling the pipeline and emptying it. Ideal is the
longer of generation, which is the work that was done divided by the servers, and training. `decision_us` is real time:
what the scheduler takes for one group, from its start to its shipping.
The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import heapq
import json
import math
import os
import platform
import random
import time
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

from orchestrator.scheduler import Scheduler, Shipment, Ticket

NUM_SERVERS = 1000
GROUPS_A_SERVER = 2
"""Of one batch."""
MEDIAN_S, PERCENTILE_99_S, LONGEST_S = 10.0, 100.0, 10.0 * 8192 / 600
SIGMA = math.log(PERCENTILE_99_S / MEDIAN_S) / NormalDist().inv_cdf(0.99)
LOAD_S = 0.5
"""From the end of a step until all servers have its version."""
NUM_STEPS, NUM_FILLING = 40, 5
RATIOS = {"equal": 1.0, "generation_bound": 0.5, "training_bound": 2.0}
"""Name: training's time divided by generation's."""
LEVELS = {"level_0": (0, 1.0), "level_1": (1, 1.0), "level_1_oversampled": (1, 1.25), "level_2": (2, 1.0)}
"""Name: (max_async_level, oversampling_factor)."""
MAX_OFF_POLICY_STEPS = 8
TARGETS = {
    "efficiency_equal_level_1_oversampled": (">=", 1 / 1.15),
    "efficiency_generation_bound_level_1": (">=", 1 / 1.15),
    "efficiency_training_bound_level_1": (">=", 1 / 1.15),
    **{f"decision_us_{name}_{mode}": ("<=", 100.0) for name in RATIOS for mode in LEVELS},
}


def generate_s(rng: random.Random) -> float:
    """Seconds that one group takes."""
    return min(LONGEST_S, rng.lognormvariate(math.log(MEDIAN_S), SIGMA))


def mean_s(num: int = 100_000) -> float:
    """Mean seconds of a group, of `num` draws."""
    rng = random.Random(1)
    return sum(generate_s(rng) for _ in range(num)) / num


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnds:
    ticket: Ticket
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLive:
    version: int


class Simulation:
    """One run. Time is the heap's; nothing sleeps."""

    def __init__(self, *, num_servers: int, level: int, oversampling: float, train_s: float) -> None:
        self._num_servers, self._train_s = num_servers, train_s
        self._rng = random.Random(0)
        self._scheduler = Scheduler(
            groups_per_batch=GROUPS_A_SERVER * num_servers,
            max_async_level=level,
            max_off_policy_steps=MAX_OFF_POLICY_STEPS,
            max_in_flight=num_servers,
            max_steps=NUM_STEPS,
            oversampling_factor=oversampling,
        )
        self._events: list[tuple[float, int, GroupEnds | StepEnds | VersionLive]] = []
        self._num_events = 0
        self._waiting: deque[Shipment] = deque()
        self._trains = False
        self._now_s = self._worked_s = self._decided_s = 0.0
        self._ended: list[tuple[float, float]] = []
        """When each step ended, and the servers' work until then, in seconds."""
        self.max_lag = self._num_shipped = 0

    def run(self) -> None:
        """To the last step."""
        self._scheduler.version_live(0)
        while len(self._ended) < NUM_STEPS:
            began_s = time.perf_counter()
            started = self._decide()
            self._decided_s += time.perf_counter() - began_s
            for ticket in started:
                took_s = generate_s(self._rng)
                self._after(took_s, GroupEnds(ticket=ticket, took_s=took_s))
            if self._waiting and not self._trains:
                self._trains = True
                self._after(self._train_s, StepEnds(version=self._waiting.popleft().step))
            self._now_s, _, event = heapq.heappop(self._events)
            self._happens(event)

    def _decide(self) -> list[Ticket]:
        """What the orchestrator's loops do whenever something has changed: ship, and start."""
        while (shipment := self._scheduler.ship()) is not None:
            self.max_lag = max(self.max_lag, *map(shipment.lag, shipment.tickets))
            self._num_shipped += len(shipment.tickets)
            self._waiting.append(shipment)
        started = []
        while (ticket := self._scheduler.start()) is not None:
            started.append(ticket)
        return started

    def _after(self, seconds: float, event: GroupEnds | StepEnds | VersionLive) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now_s + seconds, self._num_events, event))

    def _happens(self, event: GroupEnds | StepEnds | VersionLive) -> None:
        if isinstance(event, GroupEnds):
            self._worked_s += event.took_s
            self._scheduler.completed(event.ticket.group)
        elif isinstance(event, StepEnds):
            self._trains = False
            self._ended.append((self._now_s, self._worked_s))
            self._after(LOAD_S, VersionLive(version=event.version))
        else:
            self._scheduler.version_live(event.version)

    @property
    def efficiency(self) -> float:
        """The ideal time divided by the simulated one."""
        (began_s, worked_before_s), (ended_s, worked_s) = self._ended[NUM_FILLING - 1], self._ended[-NUM_FILLING]
        generation_s = (worked_s - worked_before_s) / self._num_servers
        training_s = self._train_s * (NUM_STEPS - 2 * NUM_FILLING + 1)
        return max(generation_s, training_s) / (ended_s - began_s)

    @property
    def decision_us(self) -> float:
        """Real microseconds in the scheduler for one group."""
        return self._decided_s / self._num_shipped * 1e6


def measure(num_servers: int) -> dict[str, float]:
    """All figures."""
    figures, batch_s = {}, GROUPS_A_SERVER * mean_s()
    for name, ratio in RATIOS.items():
        for mode, (level, oversampling) in LEVELS.items():
            simulation = Simulation(
                num_servers=num_servers, level=level, oversampling=oversampling, train_s=batch_s * ratio
            )
            simulation.run()
            figures[f"efficiency_{name}_{mode}"] = simulation.efficiency
            figures[f"max_lag_{name}_{mode}"] = float(simulation.max_lag)
            figures[f"decision_us_{name}_{mode}"] = simulation.decision_us
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--servers", type=int, default=NUM_SERVERS)
    options = parser.parse_args()
    figures, missed = measure(options.servers), []
    print(f"{options.servers:,} simulated servers; {os.cpu_count()} cores, {platform.machine()}\n")
    for name, value in figures.items():
        kind, target = TARGETS.get(name, ("", 0.0))
        met = not kind or (value <= target if kind == "<=" else value >= target)
        missed += [] if met else [name]
        print(f"{name:50} {value:10.3f}  {f'{kind} {target:g}' if kind else '':10} {'' if met else 'MISSED'}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
