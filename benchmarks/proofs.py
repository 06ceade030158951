"""What the proofs cost: a trainer's step with them, in turn with one that has none.

    python -m benchmarks.proofs [--check] [--size quickstart|large] [--steps 192] [--threads 1] [--run RUN]

Two trainers make the same steps, in turn, in one process: one at the defaults, the other with `proofs.share: 0` and
without the witness (whose pass adds nothing then). A step is `Trainer.update` and what keeps its version for later
proofs, not the publishing. `quickstart` is the embedded model on 256 answers of 16 groups, about 10,000 tokens; `large`
the same model on ten times as many, above the 50,000 tokens from which on samples are drawn in every step. All tokens
are of lag 1, so that none is proved for nothing, and log-probabilities are those of their version, so that every proof
holds.

Each step is a pair, of which now the one comes first and now the other. Told is the median of the pairs' differences,
of steps from which samples are drawn and of others each for itself, both weighted by how many of them there are, as a
share of the median step without proofs: by processor time of the process (`..._share`), which a busy machine changes
least, and by the clock (`..._wall_share`). `..._low` and `..._high` hold 95 % of 2,000 bootstrap draws of the pairs.
The first 8 steps, from each of which samples are drawn, are told apart as `..._first_share`. `..._run_share` is the
share of the time between two steps of a whole run: that of the trainer's, times how much of it the trainer is busy in
the finished run RUN of the quickstart. `expected_ms` is what the orchestrator takes to compute the witness of a batch,
in a thread beside its loop; `witness_bytes` what a step leaves of it in the ledger.

The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks.report import parser, report
from tools.random_models import QUICKSTART_MODEL

SIZES: dict[str, tuple[int, int, int, int]] = {"quickstart": (256, 16, 33, 6), "large": (2560, 16, 33, 6)}
"""Samples, samples of a group, tokens of a prompt, and of an answer."""
SERVER = "http://127.0.0.1:8000"
EAGER, WARM = 8, 2
"""Steps of each start from which samples are always drawn; steps that count for nothing."""
TARGETS = {"quickstart_share": ("<=", 0.015), "large_share": ("<=", 0.015), "quickstart_run_share": ("<=", 0.015)}
TARGETS |= {f"{size}_witness_bytes": ("<=", 64) for size in SIZES}


def made(size: str, policy: Any) -> list[Any]:
    """Returns a batch's samples, with the policy's own log-probabilities."""
    from grpo.transport.records import TrainingSample

    num, of_group, prompt, answer = SIZES[size]
    draw = np.random.default_rng(0)
    prompts = draw.integers(2, policy.vocab_size, (num // of_group, prompt), np.int32)
    samples = []
    for number in range(num):
        length = int(draw.integers(answer // 2, answer + answer // 2))
        ids = np.concatenate([prompts[number // of_group], draw.integers(2, policy.vocab_size, length, np.int32)])
        samples.append(
            TrainingSample(
                token_ids=ids.astype(np.int32),
                loss_mask=np.arange(len(ids)) >= prompt,
                inference_logprobs=np.zeros(len(ids), np.float32),
                advantages=float(draw.normal()),
                temperatures=1.0,
                policy_versions=((0, len(ids)),),
                env="e",
                group_id=str(number // of_group),
                rollout_id=f"{number // of_group}/{number % of_group}",
                reward=0.0,
                stop_reason="stop",
                server=SERVER,
            )
        )
    return samples


class Side:
    """A trainer with proofs, or without."""

    def __init__(self, size: str, folder: Path, *, proofs: bool, threads: int) -> None:
        import torch
        from grpo.configs.train import TrainSettings
        from grpo.orchestrator.packing import pack
        from grpo.trainer.loop import Trainer
        from grpo.trainer.model import load_policy
        from grpo.trainer.publishing import policy_spec
        from grpo.transport.records import Tolerance
        from grpo.transport.run import RunFolder
        from grpo.transport.status import PeerWatch, StatusFile

        from tests.memory_channels import MemoryBatches, MemoryBatchReceiver, MemoryPolicies

        torch.set_num_threads(threads)
        folder.mkdir()
        options: dict[str, Any] = {
            "model": str(QUICKSTART_MODEL),
            "device": "cpu",
            "recipe": "fp32",
            "sequence_len": 4096,
        }
        settings = TrainSettings.model_validate(
            options | {"learning_rate": 1e-13, "proofs": {"share": 0.01 if proofs else 0.0}}
        )
        torch.manual_seed(0)
        policy = load_policy(settings, QUICKSTART_MODEL, torch.device("cpu"))
        self.trainer = Trainer(
            settings,
            policy,
            run_folder=RunFolder(path=folder, run_id="run"),
            spec=policy_spec(settings, policy, "identity"),
            receiver=cast(Any, MemoryBatchReceiver(MemoryBatches())),
            publisher=cast(Any, MemoryPolicies(run_id="run")),
            status=StatusFile(folder / "train.json"),
            orchestrator=PeerWatch(folder / "orch.json", name="grpo-orch"),
        )
        if not proofs:
            self.trainer._optimizer._parameters.pop("witness")
            self.trainer._objective._witness = Silent()  # type: ignore[assignment]
            self.trainer._objective._watch_slope = lambda *_: None  # type: ignore[method-assign]
            policy.witness.forward = lambda sums: sums  # type: ignore[method-assign]
        self._proofs, self.samples, self.step = proofs, made(size, policy), 0
        tolerances = {SERVER: Tolerance(gap=1e-4, measure="max_abs")}
        how: dict[str, Any] = {"capacity": 4096, "num_ranks": 1, "run_id": "run", "step": 1, "tolerances": tolerances}
        [self.batches] = pack(self.samples, **how)
        self.batches = [on_policy(batch, policy) for batch in self.batches]
        self._keep(0)

    def _keep(self, step: int) -> None:
        if self._proofs:
            self.trainer._past.keep(step, num=9)

    def next(self) -> tuple[float, float]:
        """Makes a step, and returns its seconds of processor time, and by the clock."""
        from msgspec.structs import replace

        self.step += 1
        version = max(0, self.step - 2)
        batches = [
            replace(one, step=self.step, version_runs=np.array([[version, len(one.token_ids)]], np.int32))
            for one in self.batches
        ]
        since_s = time.process_time(), time.perf_counter()
        self.trainer.update(self.step, batches)
        self._keep(self.step)
        return time.process_time() - since_s[0], time.perf_counter() - since_s[1]


class Silent:
    """In the place of `Witnessing`: adds nothing to the gradients."""

    shares: Any = None

    def add(self, *_: Any) -> None:
        """Does nothing."""

    add_silent = add

    def take(self) -> float:
        """Returns what is added to a loss."""
        return 0.0


def on_policy(batch: Any, policy: Any) -> Any:
    """Returns the batch with the policy's own log-probabilities, as a perfect server would have given them."""
    import torch
    from grpo.trainer.packing import packed_tokens
    from msgspec.structs import replace

    logprobs = np.zeros(len(batch.token_ids), np.float32)
    with torch.no_grad():
        logprobs[batch.loss_mask] = policy.logprobs(packed_tokens(batch, policy.device)).numpy()
    return replace(batch, inference_logprobs=logprobs)


class Pair(NamedTuple):
    """A step with proofs and the same without: seconds of processor time, and by the clock."""

    draws: bool
    with_s: tuple[float, float]
    without_s: tuple[float, float]


def share(pairs: Sequence[Pair], clock: int) -> float:
    """Returns the median difference of a pair, of steps that draw and of others each for itself, as a share of the
    median step without proofs."""
    cost = 0.0
    for draws in (True, False):
        gaps = [one.with_s[clock] - one.without_s[clock] for one in pairs if one.draws == draws]
        cost += statistics.median(gaps) * len(gaps) / len(pairs) if gaps else 0.0
    return cost / statistics.median(one.without_s[clock] for one in pairs)


def interval(pairs: Sequence[Pair], clock: int, *, num: int = 2000) -> tuple[float, float]:
    """Returns what holds 95 % of the shares of `num` bootstrap draws, in which there are as many steps that draw as
    there are in the pairs."""
    draw = random.Random(0)
    kinds = [[one for one in pairs if one.draws == draws] for draws in (True, False)]
    again = sorted(
        share([one for kind in kinds if kind for one in draw.choices(kind, k=len(kind))], clock) for _ in range(num)
    )
    return again[int(0.025 * num)], again[int(0.975 * num)]


def measured(size: str, *, steps: int, threads: int) -> dict[str, float]:
    """Returns the figures of a size."""
    from grpo.orchestrator.witness import expected_witness, kept_of

    with tempfile.TemporaryDirectory() as parent:
        sides = [Side(size, Path(parent) / str(proofs), proofs=proofs, threads=threads) for proofs in (True, False)]
        num_tokens = sum(len(batch.token_ids) for batch in sides[0].batches)
        trainer = sides[0].trainer

        def pairs(num: int) -> list[Pair]:
            found = []
            for number in range(num):
                times = {side: sides[side].next() for side in ((0, 1) if number % 2 else (1, 0))}
                assert trainer._receipt is not None
                found.append(Pair(bool(trainer._receipt.spots), times[0], times[1]))
            return found

        pairs(WARM)
        eager, usual = pairs(EAGER - WARM), pairs(steps)
        assert trainer._receipt is not None
        assert trainer._receipt.witness is not None
        since_s = time.process_time()
        expected = expected_witness(sides[0].samples, [], trainer._settings.loss, step=1)
        expected_s = time.process_time() - since_s
        stored = len(kept_of(expected.witness, trainer._receipt.witness).components)
    figures = {
        f"{size}_tokens": float(num_tokens),
        f"{size}_step_ms": 1e3 * statistics.median(one.without_s[0] for one in usual),
        f"{size}_draws": sum(one.draws for one in usual) / len(usual),
        f"{size}_first_share": share(eager, 0),
        f"{size}_expected_ms": 1e3 * expected_s,
        f"{size}_witness_bytes": float(stored),
    }
    for clock, name in enumerate(("share", "wall_share")):
        figures[f"{size}_{name}"] = share(usual, clock)
        figures[f"{size}_{name}_low"], figures[f"{size}_{name}_high"] = interval(usual, clock)
    return figures


def busy(run: Path) -> float:
    """Returns how much of the time between two steps the trainer of a run was busy, by the medians of its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/train_s" in line and "time/step_s" in line][EAGER:]
    return float(statistics.median(one["time/train_s"] / one["time/step_s"] for one in steps))


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--size", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    command.add_argument("--steps", type=int, default=192, help="pairs of steps; of `large` a quarter")
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--run", type=Path, help="folder of a finished run of configs/quickstart")
    given = command.parse_args()
    figures: dict[str, float] = {}
    for size in given.size:
        steps = given.steps if size == "quickstart" else given.steps // 4
        figures |= measured(size, steps=steps, threads=given.threads)
    if given.run is not None and "quickstart" in given.size:
        figures["run_busy"] = busy(given.run)
        figures["quickstart_run_share"] = figures["quickstart_share"] * figures["run_busy"]
    return report("proofs", figures, TARGETS, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())
