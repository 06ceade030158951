"""Metrics: computed from a batch, merged with the trainer's, written by one writer as one JSON object a line."""

import contextlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.rollouts.records import EpisodeResult
from orchestrator.samples import new_rows
from transport.folders import write_atomic

GROUPS = (
    *("loss", "reward", "rollout", "teacher", "hints", "pairs", "policy"),
    *("optim", "perf", "time", "progress", "eval"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """The scored rollouts of one task, and the batch that they shipped in."""

    results: Sequence[EpisodeResult]
    """Those that filters kept out of the loss included: they are part of the baseline."""
    step: int
    """The batch's number, from 1."""
    found: Sequence[str] = ()
    """The name of a filter for each rollout in which it found something."""

    def lag(self, result: EpisodeResult) -> int:
        """By the oldest version that sampled any of a rollout."""
        return self.step - 1 - result.versions[0]


def batch_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Rewards, lengths and lags of one batch; means are over rollouts."""
    results = [result for group in groups for result in group.results]
    lags = [group.lag(result) for group in groups for result in group.results]
    rewards = [result.reward for result in results]
    lengths = [result.num_tokens for result in results]
    flat = [len({result.reward for result in group.results}) == 1 for group in groups]
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/accuracy": statistics.fmean(result.accuracy for result in results),
        "reward/groups_without_spread": statistics.fmean(flat),
        "rollout/num": float(len(results)),
        "rollout/temperature": statistics.fmean(_temperatures(results)),
        "rollout/num_tokens_mean": statistics.fmean(lengths),
        "rollout/num_tokens_max": float(max(lengths)),
        "rollout/truncated": statistics.fmean(result.truncated for result in results),
        "rollout/several_versions": statistics.fmean(len(result.versions) > 1 for result in results),
        "policy/lag_mean": statistics.fmean(lags),
        "policy/lag_max": float(max(lags)),
    }
    return metrics | _by_environment(results) | episode_metrics(groups)


def _temperatures(results: Sequence[EpisodeResult]) -> list[float]:
    return [step.temperature for result in results for one in result.walk() for step in one.steps[:1]]


def episode_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """What only rollouts with several steps have: calls of the policy, conversations that a template broke, rewards of
    each role; empty where all rollouts are single answers. Means are over rollouts."""
    results = [result for group in groups for result in group.results]
    rollouts = [one for result in results for one in result.walk()]
    if len(rollouts) == len(results) and all(len(one.steps) == 1 for one in rollouts):
        return {}
    broken = new_rows(rollouts)
    by_role: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for one in result.walk():
            for role in one.roles:
                by_role[f"reward/role/{role}/{one.task.env}"].append(one.rewards[role])
    return {
        "rollout/num_turns": sum(len(rollout.steps) for rollout in rollouts) / len(results),
        "rollout/num_rows": sum(len(rollout.rows) for rollout in rollouts) / len(results),
        "rollout/step_errors": sum(step.error is not None for rollout in rollouts for step in rollout.steps)
        / len(results),
        **{f"rollout/new_rows_{reason}": num / len(results) for reason, num in broken.items()},
        **{key: statistics.fmean(values) for key, values in by_role.items()},
    }


def _by_environment(results: Sequence[EpisodeResult]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        env = result.task.env
        values[f"reward/mean/{env}"].append(result.reward)
        values[f"reward/accuracy/{env}"].append(result.accuracy)
        for one in result.walk():
            for name, value in one.metrics.items():
                values[f"reward/measure/{name}/{env}"].append(value)
    return {key: statistics.fmean(column) for key, column in values.items()}


def found_metrics(groups: Sequence[ScoredGroup], names: Sequence[str]) -> dict[str, float]:
    """The share of rollouts in which each of the filters called `names` found something, enforced or not."""
    found = Counter(name for group in groups for name in group.found)
    num = sum(len(group.results) for group in groups)
    return {f"rollout/found_{name}": found[name] / num for name in names}


def dropped_metrics(dropped: Counter[str], before: Counter[str]) -> dict[str, float]:
    """Rollouts dropped since `before`, by reason; all reasons that ever occurred stay in the set."""
    counts = {f"rollout/dropped_{reason}": float(dropped[reason] - before[reason]) for reason in dropped}
    return counts | {"rollout/dropped": float(dropped.total() - before.total())}


class MetricsFile:
    """`metrics.jsonl`. The only writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def cut_after(self, step: int) -> list[Mapping[str, float]]:
        """Returns what is there of the steps up to `step`. The rest goes, and so does what is no line of metrics, like
        a last one that was cut short."""
        lines = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                lines.append((line, (metrics := json.loads(line)), int(metrics["progress/step"])))
        kept = [(line, metrics) for line, metrics, of in lines if of <= step]
        self._write_anew(line for line, _ in kept)
        return [metrics for _, metrics in kept]

    def write(self, metrics: Mapping[str, float]) -> None:
        """One line. Raises ValueError for a key outside the groups."""
        for key in metrics:
            if key.partition("/")[0] not in GROUPS:
                raise ValueError(f"metric {key!r}: expected group/name with a group of {', '.join(GROUPS)}")
        self._file.write(_line(metrics) + "\n")
        self._file.flush()

    def complete(self, step: int, more: Mapping[str, float]) -> None:
        """Adds to the line of a step that was written already."""
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["progress/step"] == step and "reward/mean" in line:
                line |= more
        self._write_anew(map(_line, lines))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write_anew(self, lines: Iterable[str]) -> None:
        self._file.close()
        write_atomic(self._path, "".join(f"{line}\n" for line in lines).encode())
        self._file = self._path.open("a", encoding="utf-8")


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps(dict(sorted(metrics.items())))
