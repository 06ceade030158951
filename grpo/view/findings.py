"""Tells from a run's metrics why it does not learn, as docs/troubleshooting.md does."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from grpo.run_files import REWARD, STEP
from grpo.view.columns import Columns

Failures = Callable[[], Mapping[str, tuple[int, str | None]]]
_AUXILIARY = ("policy/teacher_kl", "policy/sdpo_tokens", "policy/dpo_accuracy")
"""Metrics of what can be learned from beside rewards."""
WINDOW = 10
"""Newest steps, and first ones, whose means are compared."""


def findings(
    train: Columns, evaluated: Columns, *, failures: Failures, num_equal: Callable[[], int] = lambda: 0
) -> list[dict[str, Any]]:
    """Returns what stands out, each with the `metric` and the newest `step` to look at. Of the newest trace are asked:
    `failures`, the reasons of dropped rollouts; `num_equal`, how many answers are the right ones word for word."""
    if not len(steps := train.get(STEP, np.empty(0))):
        return []
    found = [
        *_of_drops(train, failures),
        *_of_fall(train),
        *_of_answers(train),
        *_of_policy(train),
        *_of_rewards(train, evaluated, num_equal),
    ]
    return [{"text": text, "do": do, "metric": metric, "step": int(steps[-1])} for text, do, metric in found]


Found = Iterator[tuple[str, str, str]]


def _ends(columns: Columns, name: str) -> tuple[float, float]:
    """Returns the means of the first and of the newest steps; NaN without the metric."""
    values = columns.get(name, np.empty(0))
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan, math.nan
    return float(values[:WINDOW].mean()), float(values[-WINDOW:].mean())


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _of_rewards(train: Columns, evaluated: Columns, num_equal: Callable[[], int]) -> Found:
    rewards = train.get(REWARD, np.empty(0))
    rewards = rewards[np.isfinite(rewards)]
    before, after = _ends(train, REWARD)
    fell = any(_of_fall(train))  # what is equal now is so because of it
    flat = _ends(train, "reward/groups_without_spread")[1]
    accuracies = evaluated.get("eval/accuracy", np.empty(0))
    accuracies = accuracies[np.isfinite(accuracies)]
    taught = any(name in train for name in _AUXILIARY)
    if taught and len(accuracies) > 1 and accuracies[-1] > accuracies[0]:
        return  # it learns from what is no reward
    if not fell and len(rewards) > 1 and np.ptp(rewards) == 0 and flat > 0.99:
        equal = num_equal() if rewards[0] <= 0 else 0
        yield (
            f"Every rollout has the same reward, {rewards[0]:g}: "
            f"{'only auxiliary losses teach' if taught else 'nothing can be learned'}.",
            f"{equal} answers of the newest step are the right ones, word for word: the reward is wrong."
            if equal
            else "Read answers beside the right ones: the task may be too hard, or the reward expects another form.",
            "reward/groups_without_spread",
        )
    elif not fell and flat > 0.5:
        yield (
            f"In {_percent(flat)} of the groups all rewards are equal, and teach nothing.",
            "Most of it is solved: harder examples, or orch.buffer.easy_threshold."
            if _ends(train, "reward/accuracy")[1] > 0.8
            else "More rollouts per example, other examples, or partial rewards.",
            "reward/groups_without_spread",
        )
    if len(accuracies) > 1 and after > before + 0.1 and accuracies[-1] <= accuracies[0]:
        yield (
            f"The reward rises ({before:.2f} → {after:.2f}), the held-out accuracy does not "
            f"({accuracies[0]:.2f} → {accuracies[-1]:.2f}).",
            "Read the answers with the highest rewards: they may please the reward without being right.",
            "eval/accuracy",
        )


def _of_fall(train: Columns) -> Found:
    """Tells of a reward that has fallen by half, and by more than the chance of a batch."""
    rewards = train.get(REWARD, np.empty(0))
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards) <= WINDOW:
        return
    best, after = float(np.convolve(rewards, np.ones(3) / 3, "valid").max()), float(rewards[-WINDOW:].mean())
    spread = float(np.fmax.reduce(train.get("reward/std", np.zeros(1))))
    if best > 0.1 and after < 0.5 * best and best - after > 0.25 * spread:
        yield (
            f"The reward has fallen from {best:.2f} to {after:.2f}.",
            "The policy moved too far: go back to an earlier step with a lower learning rate.",
            REWARD,
        )


def _of_answers(train: Columns) -> Found:
    cut = _ends(train, "rollout/truncated")[1]
    longest = float(np.fmax.reduce(train.get("rollout/num_tokens_max", np.array([np.nan]))))
    one_each = _ends(train, "rollout/num_tokens_mean")[1] <= np.fmax(1.0, _ends(train, "rollout/num_turns")[1])
    if cut > 0.1 and not one_each:  # answers of one token, as moves of a game, end at it
        began = float(np.nanmean(train["rollout/truncated"][:3]))
        yield (
            (
                f"{_percent(cut)} of the answers are cut off before they end, {_percent(began)} at first.",
                "Read the newest: where they ramble, the policy moved too far; where they are good, raise max_tokens.",
                "rollout/truncated",
            )
            if began < 0.25 * cut
            else (
                f"{_percent(cut)} of the answers are cut off before they end; they are mostly scored as wrong.",
                f"Raise max_tokens: no answer has more than {longest:.0f} tokens."
                if math.isfinite(longest)
                else "Raise max_tokens.",
                "rollout/truncated",
            )
        )


def _of_policy(train: Columns) -> Found:
    before = _ends(train, "policy/entropy")[0]
    newest = train.get("policy/entropy", np.empty(0))[-3:]
    right = _ends(train, "reward/accuracy")[1]
    if len(newest) and before > 0 and np.nanmean(newest) < 0.1 * train["policy/entropy"][0] and not right > 0.9:
        yield (
            f"Entropy has fallen from {train['policy/entropy'][0]:.3f} to {np.nanmean(newest):.3f} nats: all answers "
            "to a prompt are alike, and nothing new is tried.",
            "A lower learning rate, temperature 1, or train.loss.entropy_tau.",
            "policy/entropy",
        )
    if (masked := _ends(train, "policy/masked")[1]) > 0.1:
        yield (
            f"{_percent(masked)} of the tokens are left out by masks.",
            "The policy moves fast, or rollouts are old: a lower learning rate, or a smaller max_async_level.",
            "policy/masked",
        )
    if (mismatch := _ends(train, "policy/mismatch_kl_lag0")[1]) > 1e-3:
        yield (
            f"Server and trainer differ on the same version: a KL of {mismatch:.1e} nats.",
            "The same number types on both sides.",
            "policy/mismatch_kl_lag0",
        )


def _of_drops(train: Columns, failures: Failures) -> Found:
    dropped = np.nansum(train.get("rollout/dropped", np.zeros(1))[-WINDOW:])
    num = np.nansum(train.get("rollout/num", np.zeros(1))[-WINDOW:])
    if dropped and dropped / (dropped + num) > 0.05:
        reasons = sorted(failures().items(), key=lambda one: -one[1][0])[:3]
        told = "; ".join(
            f"{num} {reason}{f' ({message[:300]})' if message else ''}" for reason, (num, message) in reasons
        )
        yield (
            f"{_percent(dropped / (dropped + num))} of the rollouts are dropped before they are trained"
            f"{f', in the newest trace: {told}' if told else ''}.",
            "Filter the newest step by its reasons.",
            "rollout/dropped",
        )
    for asked, answered, what in (
        ("pairs/judge_asked", "pairs/judge_answered", "the judge's"),
        ("pairs/questions_asked", "pairs/questions_answered", "the teachers'"),
        ("hints/model_asked", "hints/model_answered", "the hint model's"),
    ):
        cached = answered.replace("answered", "cached")
        wanted, *come = (np.nansum(train.get(name, np.zeros(1))[-WINDOW:]) for name in (asked, answered, cached))
        got = min(wanted, sum(come))
        if wanted >= 5 and got < 0.5 * wanted:
            yield (f"{wanted - got:.0f} of {wanted:.0f} of {what} answers are missing.", "See the warnings.", asked)
