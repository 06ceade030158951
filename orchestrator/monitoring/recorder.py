"""Gathers what the loops report into metrics of each step, the reward curve and the summary."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from orchestrator.evaluate import Evaluation
from orchestrator.inference.weight_sync import CanaryReport
from orchestrator.ledger import Ledger
from orchestrator.monitoring.metrics import MetricsFile, ScoredGroup, batch_metrics, dropped_metrics
from orchestrator.monitoring.plots import plot_rewards
from orchestrator.monitoring.summary import Summary
from orchestrator.monitoring.trackers import Reporter
from orchestrator.resuming import Progress

log = logging.getLogger(__name__)

_SUMMED = frozenset({"time/train_s", "time/publish_s", "perf/train_tokens"})
"""Metrics of the trainer whose totals are in the summary."""


class Recorder:
    """The only writer of `metrics.jsonl`, `plots/` and `summary.json`."""

    def __init__(self, folder: Path, *, run_id: str, began_s: float, reporter: Reporter | None = None) -> None:
        """`reporter` is told too what is written."""
        self._folder, self._run_id, self._began_s = folder, run_id, began_s
        self._file, self._reporter = MetricsFile(folder / "metrics.jsonl"), reporter or Reporter(None, None)
        self._pending: dict[int, dict[str, float]] = {}
        self._proofs: list[CanaryReport] = []
        self._evaluations: dict[int, Mapping[str, float]] = {}
        """Metrics by version."""
        self._rewards: dict[int, float] = {}
        self._served: list[int] = []
        self._canary_max_abs = 0.0
        self._totals: defaultdict[str, float] = defaultdict(float)
        """Of the metrics in `_SUMMED`."""
        self._mismatch_max_lag0: float | None = None
        self._num_tokens = 0
        self._last_live_s = began_s
        self._start_up_s = 0.0
        self._at_last_shipment = (0, 0.0)
        self._dropped_before: Counter[str] = Counter()

    # --- an earlier process's part of the run ---

    def resume(self, progress: Progress, *, dropped: Counter[str], count: bool) -> None:
        """Goes on with what an earlier process has written, without lines of steps that the run has gone back on.
        `dropped`: rollouts that were dropped up to now, by reason. `count`: the summary's totals include what earlier
        processes did."""
        self._dropped_before = Counter(dropped)
        written = self._file.cut_after(progress.step)
        for line in written:
            self._take_over(line, count=count)
        if progress.step > 0:
            self._served.insert(0, 0)  # it has no line, and the first batch was sampled under it
        steps = {int(line["progress/step"]) for line in written if "reward/mean" in line}
        metrics = progress.metrics or {}
        self._pending = {step: dict(one) for step, one in metrics.items() if step not in steps}
        self._rewards |= {step: one["reward/mean"] for step, one in self._pending.items()}

    def _take_over(self, line: Mapping[str, float], *, count: bool) -> None:
        step = int(line["progress/step"])
        if "reward/mean" not in line:
            self._evaluations[step] = line
            return
        self._rewards[step] = line["reward/mean"]
        if "policy/canary_max_abs" in line:
            self._served.append(step)
            self._canary_max_abs = max(self._canary_max_abs, line["policy/canary_max_abs"])
        if count:
            self._sum_up(line)
            self._totals["time/load_s"] += line.get("time/load_s", 0.0)
            self._totals["earlier_generate_s"] += line["time/generate_s"]
            self._totals["earlier_generate_tokens"] += line["perf/generate_tokens"]
            self._totals["wall_s"] += line.get("time/step_s", 0.0)

    def unwritten(self, *, before: int) -> list[int]:
        """Steps before version `before` of which there are metrics, but no line yet."""
        return sorted(step for step in self._pending if step < before)

    def written_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer has published the version of `step` while no orchestrator was there to take it to the servers."""
        self._write(self._pending.pop(step) | dict(metrics))
        self._sum_up(metrics)

    def has_evaluated(self, version: int) -> bool:
        """Whether `version` need not be evaluated again."""
        return version in self._evaluations

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
    ) -> Mapping[str, float]:
        """A batch leaves. `generate_s`: seconds of sampling in this process. `more`: what else is to be written.
        Returns the batch's metrics."""
        metrics = batch_metrics(groups) | dropped_metrics(dropped, self._dropped_before) | dict(more)
        self._dropped_before = Counter(dropped)
        num_tokens, seconds = self._num_tokens - self._at_last_shipment[0], generate_s - self._at_last_shipment[1]
        self._at_last_shipment = (self._num_tokens, generate_s)
        self._rewards[step] = metrics["reward/mean"]
        self._pending[step] = metrics | {
            "time/generate_s": seconds,
            "perf/generate_tokens": float(num_tokens),
            "perf/generate_tokens_per_s": num_tokens / max(seconds, 1e-9),
            "progress/step": float(step),
        }
        return dict(self._pending[step])

    def trained(self, step: int, metrics: Mapping[str, float], *, wait_trainer_s: float) -> None:
        """The trainer has published the version of `step`, with these metrics."""
        if step in self._pending:
            self._pending[step] |= dict(metrics) | {"time/wait_trainer_s": wait_trainer_s}
            self._sum_up(metrics)

    def _sum_up(self, metrics: Mapping[str, float]) -> None:
        for key in _SUMMED & metrics.keys():
            self._totals[key] += metrics[key]
        mismatch = metrics.get("policy/mismatch_max_lag0")
        if mismatch is not None:
            self._mismatch_max_lag0 = max(mismatch, self._mismatch_max_lag0 or 0.0)

    def live(self, proof: CanaryReport) -> None:
        """A version serves; the metrics of its step are complete."""
        now_s = time.monotonic()
        step_s, self._last_live_s = now_s - self._last_live_s, now_s
        first = not self._proofs
        self._proofs.append(proof)
        self._canary_max_abs = max(self._canary_max_abs, proof.canary_max_abs)
        if first:
            self._start_up_s = step_s
            log.info("version %d is live after %.1f s", proof.version, step_s)
        is_new = proof.version not in self._served
        if is_new:
            self._served.append(proof.version)
        proved = {
            "policy/version": float(proof.version),
            "policy/canary_max_abs": proof.canary_max_abs,
            "time/load_s": proof.load_s,
        }
        if proof.version not in self._pending:
            if is_new and proof.version in self._rewards:  # written late, and a run that went back to it has it serve
                self._file.complete(proof.version, proved)
            return
        metrics = self._pending.pop(proof.version) | proved | {"time/step_s": step_s}
        self._totals["time/load_s"] += proof.load_s
        self._write(metrics)
        shown = ("reward/mean", "reward/accuracy", "perf/generate_tokens_per_s", "policy/lag_max", "time/step_s")
        log.info("step %d: %s", proof.version, ", ".join(f"{key} {metrics[key]:.4g}" for key in shown))

    def evaluated(self, evaluation: Evaluation) -> None:
        """A version has been evaluated."""
        metrics = self._evaluations[evaluation.version] = evaluation.metrics()
        self._write(metrics)
        accuracy = ", ".join(f"{env} {value:.4g}" for env, value in evaluation.accuracy.items())
        log.info("version %d: held-out accuracy %s; %d failed", evaluation.version, accuracy, evaluation.num_failed)

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._file.write(metrics)
        self._reporter.metrics(metrics)

    # --- the end ---

    def finish(self, ledger: Ledger, *, generate_s: float) -> Summary:
        """Writes picture and summary of a run that has come to its end."""
        rewards = dict(sorted(self._rewards.items()))
        plot_rewards(
            self._folder / "plots" / "reward.png",
            steps=list(rewards),
            rewards=list(rewards.values()),
            held_out=curves(self._evaluations),
            title=f"run {self._run_id}",
        )
        summary = self._summary(ledger, generate_s)
        summary.write(self._folder / "summary.json")
        self._reporter.end(asdict(summary))
        if num_lost := self._reporter.num_lost:
            summary = replace(summary, reports_lost=num_lost)
            summary.write(self._folder / "summary.json")
        return summary

    def _summary(self, ledger: Ledger, generate_s: float) -> Summary:
        rewards = [reward for _, reward in sorted(self._rewards.items())]
        last, evaluated = self._proofs[-1].version, sorted(self._evaluations.items())
        generate_s += self._totals["earlier_generate_s"]
        return Summary(
            run_id=self._run_id,
            steps=last,
            accuracy_before=self._accuracy(0),
            accuracy_after=self._accuracy(last),
            accuracies={str(version): _by_environment(metrics) for version, metrics in evaluated},
            evaluations={
                str(version): {key: value for key, value in metrics.items() if key != "progress/step"}
                for version, metrics in evaluated
            },
            evaluations_failed=sum(int(metrics["eval/failed"]) for _, metrics in evaluated),
            reward_first=rewards[0],
            reward_last=rewards[-1],
            wall_s=time.monotonic() - self._began_s + self._totals["wall_s"],
            seconds={
                "start_up": self._start_up_s,
                "generate": generate_s,
                "train": float(self._totals["time/train_s"]),
                "publish": float(self._totals["time/publish_s"]),
                "load": float(self._totals["time/load_s"]),
                "evaluate": sum(metrics["time/evaluate_s"] for _, metrics in evaluated),
            },
            tokens={
                "generate": self._num_tokens + int(self._totals["earlier_generate_tokens"]),
                "train": int(self._totals["perf/train_tokens"]),
                "evaluate": sum(int(metrics["eval/num_tokens"]) for _, metrics in evaluated),
            },
            rollouts_per_s=ledger.num_issued / max(generate_s, 1e-9),
            versions_served=tuple(sorted(self._served)),
            rollouts_issued=ledger.num_issued,
            rollouts_trained=ledger.num_trained,
            rollouts_dropped=dict(ledger.num_dropped),
            canary_max_abs=self._canary_max_abs,
            mismatch_max_lag0=self._mismatch_max_lag0,
        )

    def _accuracy(self, version: int) -> float | None:
        return self._evaluations.get(version, {}).get("eval/accuracy")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


_EVAL = "eval/accuracy/"


def curves(evaluations: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, tuple[float, float]]]:
    """Held-out accuracy and its standard error, 0 where there is none, by environment and version."""
    points: defaultdict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for version, metrics in sorted(evaluations.items()):
        for env, accuracy in _by_environment(metrics).items():
            points[env][version] = accuracy, metrics.get(f"eval/accuracy_stderr/{env}", 0.0)
    return dict(points)


def _by_environment(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key.removeprefix(_EVAL): value for key, value in metrics.items() if key.startswith(_EVAL)}
