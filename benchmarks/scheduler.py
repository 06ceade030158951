"""The scheduler in a simulated run with a thousand servers: how busy it keeps them and the trainer, on a fake clock.

    python -m benchmarks.scheduler [--check] [--servers N]

`orchestrator.scheduler.Scheduler` itself decides; servers, trainer and loading are events on a heap. A server works at
one group at a time; how long one takes is log-normal, with a 99th percentile of ten times the median, and at most 14
times it. A batch has two groups for each server. Efficiency is the ideal time divided by the simulated one, between
filling the pipeline and emptying it. Ideal is the longer of generation, which is the work that was done divided by the
servers, and training. `decision_us` is real time: what the scheduler takes for one group. The last line is one JSON
object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import deque

from orchestrator.scheduler import Scheduler

MEDIAN_S, SIGMA, LONGEST_S = 10.0, math.log(10) / statistics.NormalDist().inv_cdf(0.99), 140.0
LOAD_S, NUM_STEPS, NUM_FILLING, GROUPS_A_SERVER = 0.5, 40, 5, 2
RATIOS = {"equal": 1.0, "generation_bound": 0.5, "training_bound": 2.0}
"""Name: training's time divided by generation's."""
MODES = {"level_0": (0, 1.0), "level_1": (1, 1.0), "level_1_oversampled": (1, 1.25), "level_2": (2, 1.0)}
"""Name: (max_async_level, oversampling_factor)."""
BUSY = ("equal_level_1_oversampled", "generation_bound_level_1", "training_bound_level_1")
WANTED_EFFICIENCY, WANTED_US = 1 / 1.15, 100.0


def draw_s(rng: random.Random) -> float:
    """Seconds that one group takes."""
    return min(LONGEST_S, rng.lognormvariate(math.log(MEDIAN_S), SIGMA))


def simulate(num_servers: int, level: int, oversampling: float, train_s: float) -> tuple[float, float, int]:
    """Efficiency, real microseconds in the scheduler for one group, and the largest lag."""
    scheduler = Scheduler(
        groups_per_batch=GROUPS_A_SERVER * num_servers,
        max_async_level=level,
        max_off_policy_steps=8,
        max_in_flight=num_servers,
        max_steps=NUM_STEPS,
        oversampling_factor=oversampling,
    )
    rng, numbers = random.Random(0), itertools.count()
    events: list[tuple[float, int, str, int, float]] = [(0.0, next(numbers), "live", 0, 0.0)]
    """When, a number that breaks ties, what, of which group, step or version, and the work in it."""
    waiting, trains, worked_s, decided_s, max_lag = deque[int](), False, 0.0, 0.0, 0
    ended: list[tuple[float, float]] = []
    """When each step ended, and the servers' work until then."""
    while len(ended) < NUM_STEPS:
        now_s, _, what, which, took_s = heapq.heappop(events)
        began_s = time.perf_counter()
        if what == "group":
            worked_s += took_s
            scheduler.completed(which)
        elif what == "live":
            scheduler.version_live(which)
        elif what == "trained":
            trains = False
            ended.append((now_s, worked_s))
            heapq.heappush(events, (now_s + LOAD_S, next(numbers), "live", which, 0.0))
        while (shipment := scheduler.ship()) is not None:
            max_lag = max(max_lag, *map(shipment.lag, shipment.tickets))
            waiting.append(shipment.step)
        started = list(iter(scheduler.start, None))
        decided_s += time.perf_counter() - began_s
        for ticket in started:
            seconds = draw_s(rng)
            heapq.heappush(events, (now_s + seconds, next(numbers), "group", ticket.group, seconds))
        if waiting and not trains:
            trains = True
            heapq.heappush(events, (now_s + train_s, next(numbers), "trained", waiting.popleft(), 0.0))
    (first_s, before_s), (last_s, after_s) = ended[NUM_FILLING - 1], ended[-NUM_FILLING]
    ideal_s = max((after_s - before_s) / num_servers, train_s * (NUM_STEPS - 2 * NUM_FILLING + 1))
    num_groups = NUM_STEPS * GROUPS_A_SERVER * num_servers
    return ideal_s / (last_s - first_s), 1e6 * decided_s / num_groups, max_lag


def main() -> None:
    """Prints a table and, last, one JSON object; with --check, exits with 1 on a miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--servers", type=int, default=1000)
    options = parser.parse_args()
    batch_s = GROUPS_A_SERVER * statistics.fmean(draw_s(random.Random(one)) for one in range(20_000))
    figures, misses = {}, []
    for ratio, (mode, (level, oversampling)) in itertools.product(RATIOS, MODES.items()):
        name = f"{ratio}_{mode}"
        efficiency, decision_us, lag = simulate(options.servers, level, oversampling, RATIOS[ratio] * batch_s)
        figures[name] = {"efficiency": round(efficiency, 3), "decision_us": round(decision_us, 2), "max_lag": lag}
        print(f"{name:40} efficiency {efficiency:.3f}, {decision_us:.1f} us a group, lag up to {lag}")
        if decision_us > WANTED_US or (name in BUSY and efficiency < WANTED_EFFICIENCY):
            misses.append(name)
    print("all targets met" if not misses else f"missed: {', '.join(misses)}")
    print(json.dumps(figures))
    if options.check and misses:
        sys.exit(1)


if __name__ == "__main__":
    main()
