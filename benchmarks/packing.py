"""Cost and quality of packing one step's samples into micro-batches, materialised arrays included.

    python -m benchmarks.packing [--check]

Lengths are log-normal with a median of 600 tokens and a 99th percentile of 6,000, cut at the micro-batch's 8,192.
Time is the median of several rounds of `orchestrator.packing.pack`: from samples to the arrays that are sent. The time
of the processor itself stands beside it, for a machine that has other things to do.
Micro-steps are compared with the lower bound, all tokens divided by what the ranks take in one micro-step, over more
draws of lengths than are timed. Balance is what the ranks together wait for: the tokens of each micro-step's busiest
rank, summed over the micro-steps, divided by an even split.
The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence

import numpy as np

from orchestrator.bins import Bin, plan
from orchestrator.packing import pack
from transport.records import TrainingSample

SEQ_LEN = 8192
MEDIAN_LEN, PERCENTILE_99_LEN = 600, 6000
NUM_ROUNDS = 9
SHAPES = {"1024_over_8": (1024, 8, 100), "4096_over_32": (4096, 32, 50), "16384_over_1": (16384, 1, 10)}
"""Name: (samples, ranks, draws of lengths)."""
TARGETS = {
    "ms_1024_over_8": 20.0,
    "ms_4096_over_32": 100.0,
    "ms_16384_over_1": 500.0,
    **{f"steps_over_bound_{name}": 0.0 for name in SHAPES},
    **{f"busiest_over_even_{name}": 1.01 for name in SHAPES},
    **{f"tokens_lost_{name}": 0.0 for name in SHAPES},
}


def lengths_of(num: int, seed: int) -> list[int]:
    """`num` lengths in tokens, at least 2: a prompt and an answer."""
    z_99 = statistics.NormalDist().inv_cdf(0.99)
    sigma = np.log(PERCENTILE_99_LEN / MEDIAN_LEN) / z_99
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN_LEN), sigma, num)
    return [int(length) for length in np.clip(drawn, 2, SEQ_LEN)]


def samples_of(lengths: Sequence[int]) -> list[TrainingSample]:
    """Samples whose last three quarters are the answer."""
    rng, samples = np.random.default_rng(0), []
    for number, length in enumerate(lengths):
        mask = np.zeros(length, np.bool_)
        mask[length // 4 + 1 :] = True
        sample = TrainingSample(
            token_ids=rng.integers(0, 150_000, length, np.int32),
            loss_mask=mask,
            inference_logprobs=-rng.random(length, np.float32),
            advantages=0.5,
            temperatures=1.0,
            policy_versions=((number % 2, length),),
            env="env",
            group_id=str(number // 16),
            rollout_id=f"{number // 16}/{number % 16}",
            reward=1.0,
            stop_reason="stop",
        )
        samples.append(sample)
    return samples


def quality(ranks: Sequence[Sequence[Bin]], lengths: Sequence[int]) -> tuple[int, float]:
    """Micro-steps over the lower bound, and the busiest rank's tokens over an even split."""
    num_ranks, total = len(ranks), sum(lengths)
    bound = -(-total // (SEQ_LEN * num_ranks))
    steps = zip(*ranks, strict=True)
    busiest = sum(max(sum(lengths[sample] for sample in chosen) for chosen in step) for step in steps)
    return len(ranks[0]) - bound, busiest * num_ranks / total


def measure_shape(name: str) -> dict[str, float]:
    """All figures of one shape."""
    num, num_ranks, num_draws = SHAPES[name]
    samples, times_s, cpu_s = samples_of(lengths_of(num, seed=0)), [], []
    for _ in range(NUM_ROUNDS):
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        ranks = pack(samples, seq_len=SEQ_LEN, num_ranks=num_ranks, run_id="run", step=2)
        times_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - cpu_began_s)
    received = sum(len(batch.token_ids) for batches in ranks for batch in batches)
    draws = [lengths_of(num, seed) for seed in range(num_draws)]
    found = [quality(plan(lengths, capacity=SEQ_LEN, num_ranks=num_ranks), lengths) for lengths in draws]
    return {
        f"ms_{name}": statistics.median(times_s) * 1e3,
        f"cpu_ms_{name}": statistics.median(cpu_s) * 1e3,
        f"steps_over_bound_{name}": float(max(over for over, _ in found)),
        f"busiest_over_even_{name}": max(balance for _, balance in found),
        f"tokens_lost_{name}": float(sum(len(sample.token_ids) for sample in samples) - received),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for name in SHAPES:
        figures |= measure_shape(name)
    print(f"micro-batches of {SEQ_LEN:,} tokens; {os.cpu_count()} cores, {platform.machine()}\n")
    missed = [name for name, target in TARGETS.items() if figures[name] > target]
    for name, value in figures.items():
        target = f"<= {TARGETS[name]:g}" if name in TARGETS else ""
        print(f"{name:32} {value:10.3f}  {target:10} {'MISSED' if name in missed else ''}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
