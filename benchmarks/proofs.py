"""What the proofs cost: a trainer's step with them, in turn with one that has none.

    python -m benchmarks.proofs [--check] [--size quickstart|large] [--rounds 3] [--threads 1]

Two trainers make the same steps, in turn, in one process: one at the defaults, the other with `proofs.share: 0` and
without the witness (whose pass adds nothing then). A step is `Trainer.update` and what keeps its version for later
proofs, not the publishing. `quickstart` is the embedded model on 256 answers of 16 groups, about 5,000 tokens; `large`
the same model on ten times as many, above the 50,000 tokens from which on samples are drawn in every step. All tokens
are of lag 1, so that none is proved for nothing, and log-probabilities are those of their version, so that every proof
holds.

A step's time is the processor time of the process, which a busy machine changes less than the wall clock; a round is so
many steps that samples of small batches are drawn as often as they are on average. Told is the median of the rounds'
shares. The first 8 steps, from each of which samples are drawn, are told apart as `first_...`. `expected_ms` is what
the orchestrator takes to compute the witness of a batch, in a thread beside its loop; `witness_bytes` what a step
leaves of it in the ledger.

The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from benchmarks.report import parser, report
from tools.random_models import QUICKSTART_MODEL

SIZES: dict[str, tuple[int, int, int, int]] = {"quickstart": (256, 16, 12, 9), "large": (2560, 16, 12, 9)}
"""Samples, samples of a group, tokens of a prompt, and of an answer."""
SERVER = "http://127.0.0.1:8000"
EAGER, WARM = 8, 2
"""Steps of each start from which samples are always drawn; steps that count for nothing."""
TARGETS = {"quickstart_share": ("<=", 0.015), "large_share": ("<=", 0.015)}


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
            options | {"learning_rate": 1e-9, "proofs": {"share": 0.01 if proofs else 0.0}}
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
        self._proofs, self.samples, self.step, self.times_s = proofs, made(size, policy), 0, list[float]()
        tolerances = {SERVER: Tolerance(gap=1e-4, measure="max_abs")}
        how: dict[str, Any] = {"capacity": 4096, "num_ranks": 1, "run_id": "run", "step": 1, "tolerances": tolerances}
        [self.batches] = pack(self.samples, **how)
        self.batches = [on_policy(batch, policy) for batch in self.batches]
        self._keep(0)

    def _keep(self, step: int) -> None:
        if self._proofs:
            self.trainer._past.keep(step, num=9)

    def next(self) -> float:
        """Makes a step, and returns its seconds of processor time."""
        from msgspec.structs import replace

        self.step += 1
        version = max(0, self.step - 2)
        batches = [
            replace(one, step=self.step, version_runs=np.array([[version, len(one.token_ids)]], np.int32))
            for one in self.batches
        ]
        since_s = time.process_time()
        self.trainer.update(self.step, batches)
        self._keep(self.step)
        return time.process_time() - since_s


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


def measured(size: str, *, rounds: int, threads: int) -> dict[str, float]:
    """Returns the figures of a size."""
    from grpo.orchestrator.witness import expected_witness
    from grpo.trainer.proofs import MOST_STEPS

    with tempfile.TemporaryDirectory() as parent:
        sides = [Side(size, Path(parent) / str(proofs), proofs=proofs, threads=threads) for proofs in (True, False)]
        num_tokens = sum(len(batch.token_ids) for batch in sides[0].batches)

        def turn(num_steps: int) -> tuple[float, float]:
            steps = [[side.next() for side in sides] for _ in range(num_steps)]
            return sum(one for one, _ in steps), sum(other for _, other in steps)

        turn(WARM)
        eager = turn(EAGER - WARM)
        each = MOST_STEPS if size == "quickstart" else 2
        turns = [turn(each) for _ in range(rounds)]
        trainer = sides[0].trainer
        assert trainer._receipt is not None
        assert trainer._receipt.witness is not None
        since_s = time.process_time()
        expected = expected_witness(sides[0].samples, [], trainer._settings.loss, step=1)
        expected_s = time.process_time() - since_s
        stored = sum(len(msgspec.json.encode(one)) for one in (expected.witness, trainer._receipt.witness))
    shares = [with_proofs / without - 1 for with_proofs, without in turns]
    return {
        f"{size}_tokens": float(num_tokens),
        f"{size}_step_ms": 1e3 * statistics.median(without for _, without in turns) / each,
        f"{size}_share": statistics.median(shares),
        f"{size}_share_min": min(shares),
        f"{size}_share_max": max(shares),
        f"{size}_first_share": eager[0] / eager[1] - 1,
        f"{size}_expected_ms": 1e3 * expected_s,
        f"{size}_witness_bytes": float(stored),
    }


def main() -> int:
    """The command."""
    command = parser(__doc__)
    command.add_argument("--size", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--threads", type=int, default=1)
    given = command.parse_args()
    figures: dict[str, float] = {}
    for size in given.size:
        figures |= measured(size, rounds=given.rounds, threads=given.threads)
    return report("proofs", figures, TARGETS, check=given.check)


if __name__ == "__main__":
    raise SystemExit(main())
