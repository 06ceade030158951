"""Metrics: their names, what is computed from a batch, and the one file that they are written to."""

import contextlib
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from grpo.orchestrator.buffer import without_spread
from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.folders import remove_leftovers, write_atomic, writing

STEP, REWARD = "progress/step", "reward/mean"
"""In every line; only in those of a training step."""

NAMES = """
loss/total loss/policy loss/sdpo loss/dpo
policy/tokens policy/entropy policy/entropy/ENV policy/kl policy/ratio_mean policy/ratio_min policy/ratio_max
policy/log_ratio_clamped policy/masked policy/masked_REASON policy/clipped policy/slope policy/teacher_kl
policy/tokens_lagN policy/mismatch_kl_lagN policy/mismatch_max_lagN policy/moved_kl_lagN policy/adapter_tokens_NAME
policy/custom_NAME policy/sdpo_tokens policy/sdpo_divergence policy/sdpo_clipped
policy/dpo_pairs policy/dpo_tokens policy/dpo_margin policy/dpo_accuracy
policy/noise_sigma policy/lag_mean policy/lag_max policy/version policy/canary_max_abs policy/canary_base_max_abs
proofs/tokens proofs/tokens_now proofs/max_abs proofs/mean_abs proofs/failed proofs/unproved proofs/dropped
optim/grad_norm optim/grad_norm_LOSS optim/grad_share_LOSS optim/learning_rate optim/signal
reward/mean reward/std reward/accuracy reward/groups_without_spread reward/overlong_penalty reward/reference_kl_penalty
reward/mean/ENV reward/accuracy/ENV
reward/measure/NAME/ENV reward/role/ROLE/ENV
rollout/num rollout/temperature rollout/num_tokens_mean rollout/num_tokens_max rollout/truncated
rollout/several_versions rollout/num_turns rollout/num_rows rollout/step_errors rollout/new_rows
rollout/found_FILTER rollout/dropped rollout/dropped_REASON rollout/restarted
rollout/answers_withdrawn
teacher/rows teacher/tokens teacher/tokens_left_out teacher/requests teacher/failed teacher/failed_REASON
evidence/hinted evidence/asked evidence/hints_failed
hints/errors hints/given hints/given_SOURCE hints/declined_REASON hints/left_out_REASON
hints/model_asked hints/model_answered hints/model_REASON hints/model_cost
pairs/made pairs/too_old pairs/not_taken pairs/turns_seen pairs/turns_asked pairs/turns_queue_full pairs/turns_too_old
pairs/turns_waiting pairs/skipped_REASON pairs/broken pairs/questions_asked pairs/questions_answered
pairs/questions_cached pairs/questions_REASON pairs/questions_REASON/TEACHER pairs/requests
pairs/judge_asked pairs/judge_answered pairs/judge_REASON pairs/ready pairs/cost pairs/cost_per_rollout
perf/train_tokens perf/train_tokens_per_s perf/train_tflops perf/train_mfu
perf/generate_tokens perf/generate_tokens_per_s perf/max_concurrent_groups
perf/servers perf/server_running perf/server_waiting perf/server_kv_use
time/wait_batch_s time/wait_batch_at_s time/train_s time/train_at_s time/publish_s time/publish_at_s
time/proofs_s time/proofs_at_s time/write_version_s time/checkpoint_s time/write_checkpoint_s
time/generate_s time/wait_trainer_s time/load_s time/step_s time/sleep_s time/wake_s time/evaluate_s time/evaluate_s/ENV
progress/step progress/examples_POOL
eval/accuracy eval/accuracy/ENV eval/accuracy_stderr/ENV eval/reward/ENV eval/reward_stderr/ENV eval/pass@K/ENV
eval/measure/NAME/ENV eval/num_tokens_mean/ENV eval/num_tokens eval/truncated/ENV eval/failed eval/failed/ENV
eval/skipped
""".split()  # noqa: SIM905
"""Every metric that a line may have, the trainer's included; what is in capitals is filled in. docs/metrics.md says
what each means."""
_KNOWN = re.compile("|".join(re.sub("[A-Z]+", ".+", re.escape(name)) for name in NAMES))


@cache
def check_name(key: str) -> None:
    """Raises ValueError for a metric that is none of NAMES."""
    if _KNOWN.fullmatch(key) is None:
        raise ValueError(f"metric {key!r} is none of NAMES in {__name__}; add it there and to docs/metrics.md")


# --- what parts of the program have counted ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a part of the program has counted since the process began, by metric. `since` makes a step's metrics of it,
    so that whoever counts need not know when steps end."""

    counts: Mapping[str, float] = field(default_factory=dict)
    """Numbers that only rise; a step has what was added."""
    means: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, number) of values, both of which only rise; a step has the mean of those that were added."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers as they are now."""

    def since(self, before: "Figures") -> dict[str, float]:
        """Returns the metrics of the time since `before`. A count stays in the set once it was ever there; a mean of
        nothing new is left out."""
        means = dict[str, float]()
        for name, (total, num) in self.means.items():
            old_total, old_num = before.means.get(name, (0.0, 0.0))
            if num > old_num:
                means[name] = (total - old_total) / (num - old_num)
        counts = {name: float(num - before.counts.get(name, 0)) for name, num in self.counts.items()}
        return {**counts, **means, **self.values}


def all_figures(parts: Iterable[Figures]) -> Figures:
    """Returns the figures of all parts as one; each has its own names."""
    counts, means, values = dict[str, float](), dict[str, tuple[float, float]](), dict[str, float]()
    for one in parts:
        counts, means, values = {**counts, **one.counts}, {**means, **one.means}, {**values, **one.values}
    return Figures(counts=counts, means=means, values=values)


# --- of a batch ---


def lag(result: EpisodeResult, step: int) -> int:
    """Returns the lag of a rollout that ships with batch `step`, counted from the oldest version that sampled any of
    it."""
    return step - 1 - result.versions[0]


def batch_metrics(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """Rewards, lengths and lags of batch `step`; means are over rollouts, those that filters keep out of the loss
    included: they are part of the baseline."""
    results = [result for group in groups for result in group.results]
    lags = [lag(result, step) for result in results]
    rewards = [result.reward for result in results]
    lengths = [result.num_tokens for result in results]
    flat = [without_spread([result.reward for result in group.results]) is not None for group in groups]
    temperatures = [one.steps[0].temperature for result in results for one in result.walk() if one.steps]
    metrics = {
        REWARD: statistics.fmean(rewards),
        "reward/std": float(np.std(rewards)),
        "reward/accuracy": statistics.fmean(result.accuracy for result in results),
        "reward/groups_without_spread": statistics.fmean(flat),
        "rollout/num": float(len(results)),
        "rollout/temperature": statistics.fmean(temperatures),
        "rollout/num_tokens_mean": statistics.fmean(lengths),
        "rollout/num_tokens_max": float(max(lengths)),
        "rollout/truncated": statistics.fmean(result.truncated for result in results),
        "rollout/several_versions": statistics.fmean(len(result.versions) > 1 for result in results),
        "policy/lag_mean": statistics.fmean(lags),
        "policy/lag_max": float(max(lags)),
    }
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        values[f"{REWARD}/{result.task.env}"].append(result.reward)
        values[f"reward/accuracy/{result.task.env}"].append(result.accuracy)
        for one in result.walk():
            for name, value in one.metrics.items():
                values[f"reward/measure/{name}/{result.task.env}"].append(value)
    means = {key: statistics.fmean(column) for key, column in values.items()}
    return metrics | means | _of_episodes(results)


def _of_episodes(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """Returns metrics that only rollouts with several steps have: calls of the policy, conversations that a template
    broke, rewards of each role. Empty where all rollouts are single answers. Means are over rollouts."""
    rollouts = [one for result in results for one in result.walk()]
    if len(rollouts) == len(results) and all(len(one.steps) == 1 for one in rollouts):
        return {}
    by_role: dict[str, list[float]] = defaultdict(list)
    for one in rollouts:
        for role in one.roles:
            by_role[f"reward/role/{role}/{one.task.env}"].append(one.rewards[role])
    sums = {
        "rollout/num_turns": sum(len(one.steps) for one in rollouts),
        "rollout/num_rows": sum(len(one.rows) for one in rollouts),
        "rollout/step_errors": sum(step.error is not None for one in rollouts for step in one.steps),
        "rollout/new_rows": sum(row.turns[0].index > 0 for one in rollouts for row in one.rows),
    }
    means = {key: num / len(results) for key, num in sums.items()}
    return means | {key: statistics.fmean(column) for key, column in by_role.items()}


def found_metrics(groups: Sequence[ScoredGroup], names: Sequence[str]) -> dict[str, float]:
    """The share of rollouts in which each of the filters called `names` found something, enforced or not."""
    found = Counter(name for group in groups for name in group.found)
    num = sum(len(group.results) for group in groups)
    return {f"rollout/found_{name}": found[name] / num for name in names}


def dropped_figures(dropped: Counter[str]) -> Figures:
    """Returns how many rollouts were dropped, by reason."""
    counts = {f"rollout/dropped_{reason}": num for reason, num in dropped.items()}
    return Figures(counts=counts | {"rollout/dropped": dropped.total()})


# --- the file ---


class MetricsFile:
    """`metrics.jsonl`, one JSON object a line. The only writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        remove_leftovers(path.parent, path.name)
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def lines(self) -> list[dict[str, float]]:
        """Returns the lines of metrics that are there; others, such as a last line that was cut short, are skipped."""
        lines = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                metrics: dict[str, float] = json.loads(line)
                lines.append(metrics | {STEP: float(metrics[STEP])})
        return lines

    def cut_after(self, step: int) -> list[dict[str, float]]:
        """Returns what is there of the steps up to `step`. The rest goes."""
        kept = [line for line in self.lines() if line[STEP] <= step]
        self._file.close()
        write_atomic(self._path, "".join(map(_line, kept)).encode())
        with writing(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        return kept

    def write(self, metrics: Mapping[str, float]) -> None:
        """One line. Raises ValueError for a metric that is none of NAMES."""
        for key in metrics:
            check_name(key)
        with writing(self._path):
            self._file.write(_line(metrics))
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps(dict(sorted(metrics.items()))) + "\n"
