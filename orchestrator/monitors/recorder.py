"""Gathers what the loops report into metrics of each step, the reward curve and the summary."""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.evaluate import Evaluation
from orchestrator.ledger import Ledger
from orchestrator.monitors.metrics import MetricsFile, ScoredGroup, batch_metrics, dropped_metrics
from orchestrator.monitors.plots import plot_rewards
from orchestrator.monitors.summary import Summary
from orchestrator.relay import Proof

log = logging.getLogger(__name__)


class Recorder:
    """The only writer of `metrics.jsonl`, `plots/` and `summary.json`."""

    def __init__(self, folder: Path, *, run_id: str, began_s: float) -> None:
        self._folder, self._run_id, self._began_s = folder, run_id, began_s
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._pending: dict[int, dict[str, float]] = {}
        self._proofs: list[Proof] = []
        self._evaluations: list[Evaluation] = []
        self._rewards: dict[int, float] = {}
        self._train: Counter[str] = Counter()
        self._mismatch_max_lag0: float | None = None
        self._num_tokens = 0
        self._last_live_s = began_s
        self._start_up_s = 0.0
        self._at_last_shipment = (0, 0.0)
        self._dropped_before: Counter[str] = Counter()

    # --- what happened ---

    def sampled(self, num_tokens: int) -> None:
        """A rollout has been sampled."""
        self._num_tokens += num_tokens

    def shipped(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        *,
        dropped: Counter[str],
        generate_s: float,
        more: Mapping[str, float],
    ) -> None:
        """A batch leaves. `generate_s`: seconds of sampling since the run began. `more`: what else is to be written."""
        metrics = batch_metrics(groups) | dropped_metrics(dropped, self._dropped_before) | dict(more)
        self._dropped_before = Counter(dropped)
        num_tokens, seconds = self._num_tokens - self._at_last_shipment[0], generate_s - self._at_last_shipment[1]
        self._at_last_shipment = (self._num_tokens, generate_s)
        self._rewards[step] = metrics["reward/mean"]
        self._pending[step] = metrics | {
            "time/generate_s": seconds,
            "perf/generate_tokens_per_s": num_tokens / max(seconds, 1e-9),
            "progress/step": float(step),
        }

    def trained(self, step: int, metrics: Mapping[str, float], *, wait_trainer_s: float) -> None:
        """The trainer has published the version of `step`, with these metrics."""
        self._pending[step] |= dict(metrics) | {"time/wait_trainer_s": wait_trainer_s}
        for key in ("time/train_s", "time/publish_s", "perf/train_tokens"):
            self._train[key] += metrics.get(key, 0.0)  # type: ignore[assignment]
        mismatch = metrics.get("policy/mismatch_max_lag0")
        if mismatch is not None:
            self._mismatch_max_lag0 = max(mismatch, self._mismatch_max_lag0 or 0.0)

    def live(self, proof: Proof) -> None:
        """A version serves; the metrics of its step are complete."""
        now_s = time.monotonic()
        step_s, self._last_live_s = now_s - self._last_live_s, now_s
        self._proofs.append(proof)
        if proof.version == 0:
            self._start_up_s = step_s
            log.info("version 0 is live after %.1f s", step_s)
            return
        metrics = self._pending.pop(proof.version) | {
            "policy/version": float(proof.version),
            "policy/canary_max_abs": proof.canary_max_abs,
            "time/load_s": proof.load_s,
            "time/step_s": step_s,
        }
        self._file.write(metrics)
        shown = ("reward/mean", "reward/accuracy", "perf/generate_tokens_per_s", "policy/lag_max", "time/step_s")
        log.info("step %d: %s", proof.version, ", ".join(f"{key} {metrics[key]:.4g}" for key in shown))

    def evaluated(self, evaluation: Evaluation) -> None:
        """A version has been evaluated."""
        self._evaluations.append(evaluation)
        self._file.write(evaluation.metrics())
        accuracy = ", ".join(f"{env} {value:.4g}" for env, value in evaluation.accuracy.items())
        log.info("version %d: held-out accuracy %s; %d failed", evaluation.version, accuracy, evaluation.num_failed)

    # --- the end ---

    def finish(self, ledger: Ledger, *, generate_s: float) -> Summary:
        """Writes picture and summary of a run that has come to its end."""
        accuracies = {one.version: one.mean_accuracy for one in self._evaluations}
        plot_rewards(
            self._folder / "plots" / "reward.png",
            steps=list(self._rewards),
            rewards=list(self._rewards.values()),
            accuracies=accuracies,
            title=f"run {self._run_id}",
        )
        summary = self._summary(ledger, accuracies, generate_s)
        summary.write(self._folder / "summary.json")
        return summary

    def _summary(self, ledger: Ledger, accuracies: Mapping[int, float], generate_s: float) -> Summary:
        rewards = list(self._rewards.values())
        last = self._proofs[-1].version
        return Summary(
            run_id=self._run_id,
            steps=last,
            accuracy_before=accuracies.get(0),
            accuracy_after=accuracies.get(last),
            accuracies={str(one.version): one.accuracy for one in self._evaluations},
            evaluations_failed=sum(one.num_failed for one in self._evaluations),
            reward_first=rewards[0],
            reward_last=rewards[-1],
            wall_s=time.monotonic() - self._began_s,
            seconds={
                "start_up": self._start_up_s,
                "generate": generate_s,
                "train": float(self._train["time/train_s"]),
                "publish": float(self._train["time/publish_s"]),
                "load": sum(proof.load_s for proof in self._proofs),
                "evaluate": sum(one.seconds for one in self._evaluations),
            },
            tokens={
                "generate": self._num_tokens,
                "train": int(self._train["perf/train_tokens"]),
                "evaluate": sum(one.num_tokens for one in self._evaluations),
            },
            rollouts_per_s=ledger.num_issued / max(generate_s, 1e-9),
            versions_served=tuple(proof.version for proof in self._proofs),
            rollouts_issued=ledger.num_issued,
            rollouts_trained=ledger.num_trained,
            rollouts_dropped=dict(ledger.num_dropped),
            canary_max_abs=max(proof.canary_max_abs for proof in self._proofs),
            mismatch_max_lag0=self._mismatch_max_lag0,
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
