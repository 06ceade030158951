"""Gathers what the loops report into metrics of each step, and at the end the summary."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from grpo.orchestrator.evaluate import Evaluation
from grpo.orchestrator.inference.weight_sync import CanaryReport
from grpo.orchestrator.ledger import Ledger
from grpo.orchestrator.monitoring.collapse import CollapseWatch
from grpo.orchestrator.monitoring.metrics import REWARD, STEP, Figures, MetricsFile, all_figures, dropped_figures
from grpo.orchestrator.monitoring.summary import Summary, summarise
from grpo.orchestrator.monitoring.trackers import Reporter
from grpo.orchestrator.resuming import Progress
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.run_warnings import run_warnings

log = logging.getLogger(__name__)


class Recorder:
    """The only writer of `metrics.jsonl` and `summary.json`."""

    def __init__(self, folder: Path, *, run_id: str, began_s: float, reporter: Reporter | None = None) -> None:
        """`reporter` gets what is written."""
        self._folder, self._run_id, self._began_s = folder, run_id, began_s
        self._file, self._reporter = MetricsFile(folder / "metrics.jsonl"), reporter or Reporter(None, None)
        self._collapse = CollapseWatch()
        self._pending: dict[int, dict[str, float]] = {}
        """Metrics of steps whose version is not live yet."""
        self._evaluated: set[int] = set()
        self._first: CanaryReport | None = None
        self._last_live_s = began_s
        self._start_up_s = self._earlier_s = 0.0
        self._resumed_at = self._counted_from = 0
        """The step that the run went on after, and the one whose totals the summary begins with."""
        self._num_tokens = 0
        """Sampled in this process."""
        self._figures = Figures()
        """The figures when the last batch left."""

    # --- an earlier process's part of the run ---

    def resume(self, progress: Progress, *, dropped: Counter[str], count: bool) -> None:
        """Goes on with what an earlier process has written, without lines of steps that the run has gone back on.
        `dropped`: rollouts that were dropped up to now, by reason. `count`: the summary's totals include what earlier
        processes did."""
        self._figures = dropped_figures(dropped)
        written = self._file.cut_after(progress.step)
        steps = {int(line[STEP]): line for line in written if REWARD in line}
        self._evaluated = {int(line[STEP]) for line in written if REWARD not in line}
        self._pending = {step: dict(one) for step, one in (progress.metrics or {}).items() if step not in steps}
        self._resumed_at, self._counted_from = progress.step, 0 if count else progress.step + 1
        self._earlier_s = sum(line.get("time/step_s", 0.0) for line in steps.values()) if count else 0.0

    def unwritten(self, *, before: int) -> list[int]:
        """Steps before version `before` of which there are metrics, but no line yet."""
        return sorted(step for step in self._pending if step < before)

    def written_late(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer has published the version of `step` while no orchestrator was there to take it to the servers."""
        self._write(self._pending.pop(step) | dict(metrics))

    def has_evaluated(self, version: int) -> bool:
        """Whether `version` need not be evaluated again."""
        return version in self._evaluated

    # --- what happened ---

    def sampled(self, num_tokens: int) -> None:
        """A rollout has been sampled."""
        self._num_tokens += num_tokens

    def shipped(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        parts: Iterable[Figures],
        dropped: Counter[str],
        generate_s: float,
    ) -> Mapping[str, float]:
        """A batch leaves. `metrics`: its own. `parts`: what the program's parts have counted until now; what is written
        is what came since the last batch. `generate_s`: seconds of sampling since then. Returns all that is written of
        the batch."""
        tokens = "perf/generate_tokens"
        own = Figures(counts={tokens: self._num_tokens})
        figures = all_figures([*parts, dropped_figures(dropped), own])
        since, self._figures = figures.since(self._figures), figures
        self._pending[step] = {
            **metrics,
            **since,
            "time/generate_s": generate_s,
            f"{tokens}_per_s": since[tokens] / max(generate_s, 1e-9),
            STEP: float(step),
        }
        return dict(self._pending[step])

    def trained(self, step: int, metrics: Mapping[str, float], *, wait_trainer_s: float) -> None:
        """The trainer has published the version of `step`, with these metrics."""
        if step in self._pending:
            self._pending[step] |= dict(metrics) | {"time/wait_trainer_s": wait_trainer_s}

    def live(self, proof: CanaryReport) -> None:
        """A version serves; the metrics of its step are complete."""
        now_s = time.monotonic()
        step_s, self._last_live_s = now_s - self._last_live_s, now_s
        proved = {
            "policy/version": float(proof.version),
            "policy/canary_max_abs": proof.canary_max_abs,
            "policy/canary_base_max_abs": proof.canary_base_max_abs,
            "time/load_s": proof.load_s,
        }
        if self._first is None:
            self._first, self._start_up_s = proof, step_s
            log.info("version %d is live after %.1f s", proof.version, step_s)
        if proof.version in self._pending:
            metrics = self._pending.pop(proof.version) | proved | {"time/step_s": step_s}
            self._collapse.step(metrics)
            self._write(metrics)
            shown = (REWARD, "reward/accuracy", "perf/generate_tokens_per_s", "policy/lag_max", "time/step_s")
            log.info("step %d: %s", proof.version, ", ".join(f"{key} {metrics[key]:.4g}" for key in shown))

    def batch(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """A batch leaves: trackers get its rollouts, where they are due."""
        self._collapse.batch(step, [result for group in groups for result in group.results])
        self._reporter.batch(step, groups)

    def evaluated(self, evaluation: Evaluation) -> None:
        """A version has been evaluated."""
        self._evaluated.add(evaluation.version)
        self._write(evaluation.metrics)
        accuracy = ", ".join(f"{env} {value:.4g}" for env, value in evaluation.accuracy.items())
        log.info("version %d: held-out accuracy %s", evaluation.version, accuracy)

    def _write(self, metrics: Mapping[str, float]) -> None:
        self._file.write(metrics)
        self._reporter.metrics(metrics)

    # --- the end ---

    def finish(self, ledger: Ledger) -> Summary:
        """Writes the summary of a run that has come to its end."""
        assert self._first is not None
        lines = self._file.lines()
        summary = summarise(
            lines,
            ledger,
            run_id=self._run_id,
            first=self._first,
            resumed=self._resumed_at > 0,
            counted_from=self._counted_from,
            wall_s=time.monotonic() - self._began_s + self._earlier_s,
            start_up_s=self._start_up_s,
            warnings=run_warnings(self._folder),
        )
        summary.write(self._folder / "summary.json")
        self._reporter.end(asdict(summary))
        return summary

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
