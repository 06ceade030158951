"""The quickstart trained synchronously and asynchronously, with real servers, and generation and training of equal
length.

`grpo bench-async` does the work. Where two cores cannot generate and train at the same time without slowing each other,
rewards sleep, so that a batch's generation takes as long as its training without using the processor: what is shown is
that the two overlap, not how fast either is. The longer of the two is that of the asynchronous run; the ideal is that
of the synchronous one, where neither slows the other.
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from deploy.arguments import parse
from deploy.bench_async import Comparison, RunFailed, compare, print_table

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart"
NUM_STEPS = 40
TRAINING_IS_LONGER = ("--infer.max_num_seqs", "256", "--train.gradient_checkpointing", "true")
"""Rewards can only lengthen generation, so it must be the shorter of the two to begin with."""
MAX_REWARD_DIFFERENCE = 0.05
"""Of mean rewards between 0 and 1; or the noise of the two, where that is more."""
TARGETS = {
    "wall_over_longer": ("<=", 1.15),
    "imbalance": ("<=", 0.15),
    "reward_beyond_noise": ("<=", 0.0),
}


def figures(comparison: Comparison) -> dict[str, float]:
    """What is printed and checked."""
    sync, other = comparison.sync, comparison.asynchronous
    allowed = max(MAX_REWARD_DIFFERENCE, comparison.reward_noise)
    return {
        "wall_s_sync": sync.wall_s,
        "wall_s_async": other.wall_s,
        "generate_s_sync": sync.generate_s,
        "train_s_sync": sync.train_s,
        "generate_s_async": other.generate_s,
        "train_s_async": other.train_s,
        "imbalance": comparison.imbalance,
        "wall_over_longer_sync": sync.wall_s / sync.longer_s,
        "wall_over_longer": other.wall_s / other.longer_s,
        "wall_over_ideal": other.wall_s / comparison.ideal_s,
        "rollouts_per_s_sync": sync.rollouts_per_s,
        "rollouts_per_s_async": other.rollouts_per_s,
        "lag_mean_async": other.lag_mean,
        "lag_max_async": other.lag_max,
        "reward_sync": sync.reward_last,
        "reward_async": other.reward_last,
        "reward_noise": comparison.reward_noise,
        "reward_beyond_noise": max(0.0, abs(comparison.reward_difference) - allowed),
    }


def measure(folder: Path, *, num_steps: int) -> Comparison:
    """Both runs, without evaluation, which would use the servers beside the training."""
    options = ["--max_steps", str(num_steps), "--orch.eval.num_examples", "0", *TRAINING_IS_LONGER]
    return compare(parse([str(CONFIG), *options]), folder, equalise=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"training steps of each run ({NUM_STEPS})")
    parser.add_argument("--output_dir", type=Path, help="keep runs, report and picture there (else they are removed)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            comparison = measure(options.output_dir or Path(temporary), num_steps=options.steps)
        except RunFailed:
            return 1
    print_table(comparison)
    found, missed = figures(comparison), []
    print(f"\n{options.steps} steps of {CONFIG.name}; {os.cpu_count()} cores, {platform.machine()}\n")
    for name, value in found.items():
        kind, target = TARGETS.get(name, ("", 0.0))
        met = not kind or value <= target
        missed += [] if met else [name]
        print(f"{name:24} {value:10.3f}  {f'{kind} {target:g}' if kind else '':8} {'' if met else 'MISSED'}")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    return int(options.check and bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
