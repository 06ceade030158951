"""The figures of an ablation's runs, and the table of its arms."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.compare import last_quarter, mean_and_deviation, steps_of
from deploy.plan import Plan

_HELD_OUT = {"eval/accuracy/": "accuracy", "eval/measure/": "measure"}
"""Beginnings of an evaluation's metrics that go with ENV and NAME/ENV, and what they are called here."""
_STREAMS = ("policy", "sdpo", "dpo")
_NEWEST = {
    "reward_last_quarter": "reward/mean",
    "errors_per_rollout": "rollout/step_errors",
    "loss_total": "loss/total",
    **{f"loss_{stream}": f"loss/{stream}" for stream in _STREAMS},
    **{f"grad_share_{stream}": f"optim/grad_share_{stream}" for stream in _STREAMS},
    "sdpo_divergence": "policy/sdpo_divergence",
    "dpo_accuracy": "policy/dpo_accuracy",
    "teacher_kl": "policy/teacher_kl",
}
"""Figures that are means over the last quarter of the steps."""
_SUMS = {
    "errors": "hints/errors",
    "hints_given": "hints/given",
    "pairs_made": "pairs/made",
    "pairs_trained": "policy/dpo_pairs",
}
"""Figures that are sums over all steps."""
_COSTS = ("pairs/cost", "hints/model_cost")
"""What was spent until a step."""
_ROWS = (
    ("reward, last quarter", "reward_last_quarter", "{:.3f}"),
    ("errors a rollout, last quarter", "errors_per_rollout", "{:.3f}"),
    ("loss", "loss_total", "{:.4f}"),
    ("  of the policy", "loss_policy", "{:.4f}"),
    ("  of hints", "loss_sdpo", "{:.4f}"),
    ("  of pairs", "loss_dpo", "{:.4f}"),
    ("share of the gradient: policy", "grad_share_policy", "{:.2f}"),
    ("  hints", "grad_share_sdpo", "{:.2f}"),
    ("  pairs", "grad_share_dpo", "{:.2f}"),
    ("divergence from the hinted policy", "sdpo_divergence", "{:.4f}"),
    ("pairs preferred rightly", "dpo_accuracy", "{:.3f}"),
    ("KL to the teacher", "teacher_kl", "{:.4f}"),
    ("errors that could have hints", "errors", "{:,.0f}"),
    ("hints given", "hints_given", "{:,.0f}"),
    ("pairs made", "pairs_made", "{:,.0f}"),
    ("pairs trained", "pairs_trained", "{:,.0f}"),
    ("cost of teachers", "cost", "{:,.4f}"),
    ("seconds a step, median", "seconds_per_step", "{:.2f}"),
    ("wall time, s", "wall_s", "{:,.0f}"),
    ("tokens sampled", "tokens_sampled", "{:,.0f}"),
    ("tokens trained", "tokens_trained", "{:,.0f}"),
    ("tokens in all", "tokens_total", "{:,.0f}"),
)
"""Title, figure, format. A row without a figure in any arm is left out."""


def measured(folder: Path) -> dict[str, float]:
    """The figures of a finished run; what it does not have, such as the loss of a stream that is off, is absent.

    Losses, shares and the like are means over the last quarter of the steps, those of them that have the metric; sums
    and costs are of the whole run. Raises `CannotCompare` where there are no metrics.
    """
    steps = steps_of(folder)
    summary = json.loads((folder / "summary.json").read_bytes())
    newest = {name: last_quarter(steps, key) for name, key in _NEWEST.items()}
    sums = {name: [step[key] for step in steps.values() if key in step] for name, key in _SUMS.items()}
    costs = [max(spent) for key in _COSTS if (spent := [step[key] for step in steps.values() if key in step])]
    tokens = summary["tokens"]
    return {
        **_held_out(summary["evaluations"]),
        **{name: statistics.fmean(values) for name, values in newest.items() if values},
        **{name: math.fsum(values) for name, values in sums.items() if values},
        **({"cost": math.fsum(costs)} if costs else {}),
        "seconds_per_step": statistics.median(step["time/step_s"] for step in steps.values()),
        "wall_s": summary["wall_s"],
        "tokens_sampled": tokens["generate"],
        "tokens_trained": tokens["train"],
        "tokens_total": sum(tokens.values()),
    }


def _held_out(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Of each environment, by the first and by the last version that was evaluated."""
    if len(evaluations) < 2:
        return {}
    found = list(evaluations.values())
    return {
        f"{name}_{when}/{key.removeprefix(beginning)}": value
        for when, evaluation in (("before", found[0]), ("after", found[-1]))
        for key, value in evaluation.items()
        for beginning, name in _HELD_OUT.items()
        if key.startswith(beginning)
    }


def fields_of(runs: Iterable[tuple[str, int | None, Plan]]) -> dict[str, Any]:
    """As JSON: by arm, its weights, its runs, and over them the means and standard deviations (from two runs on) of
    each figure. `runs`: arm, seed and settings of each."""
    arms: dict[str, dict[str, Any]] = {}
    steps = None
    for arm, seed, plan in runs:
        loss, steps = plan.train.loss, plan.orch.max_steps
        fields = arms.setdefault(arm, {"alpha_sdpo": loss.alpha_sdpo, "beta_replay": loss.beta_replay, "runs": []})
        chosen = plan.train.seed if seed is None else seed
        fields["runs"].append({"seed": chosen, "folder": str(plan.output_dir), "figures": measured(plan.output_dir)})
    for fields in arms.values():
        fields["mean"], fields["deviation"] = _over([run["figures"] for run in fields["runs"]])
    return {"steps": steps, "arms": arms}


def _over(runs: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    means, deviations = {}, {}
    for name in dict.fromkeys(name for run in runs for name in run):
        means[name], deviation = mean_and_deviation([run[name] for run in runs if name in run])
        if deviation is not None:
            deviations[name] = deviation
    return means, deviations


def rows(fields: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table: a title, and a text for each arm, empty where it has no such figure."""
    arms = list(fields["arms"].values())
    figures = dict.fromkeys(name for arm in arms for name in arm["mean"] if "/" in name)
    held_out = [(_title_of(name), name, "{:.3f}") for name in sorted(figures, key=_order)]
    table = [(title, *(_shown(arm, name, form) for arm in arms)) for title, name, form in (*held_out, *_ROWS)]
    weights = [(name, *(f"{arm[name]:g}" for arm in arms)) for name in ("alpha_sdpo", "beta_replay")]
    return [*weights, *(row for row in table if any(row[1:]))]


def _order(figure: str) -> tuple[str, bool, str, bool]:
    """By environment, its accuracy first, and of each thing what was before first."""
    what, when, name, env = _parts(figure)
    return env, what != "accuracy", name, when == "after"


def _title_of(figure: str) -> str:
    """`zorplex, tool_spam after`."""
    what, when, name, env = _parts(figure)
    return f"{env}, {name or what} {when}"


def _parts(figure: str) -> tuple[str, str, str, str]:
    """Of `measure_after/tool_spam/zorplex`: what, when, the measure's name (empty of accuracies), the environment."""
    head, _, rest = figure.partition("/")
    what, _, when = head.rpartition("_")
    name, _, env = rest.partition("/") if what == "measure" else ("", "", rest)
    return what, when, name, env


def _shown(arm: Mapping[str, Any], name: str, form: str) -> str:
    if name not in arm["mean"]:
        return ""
    deviation = arm["deviation"].get(name)
    return form.format(arm["mean"][name]) + ("" if deviation is None else f" ± {form.format(deviation)}")


def print_table(fields: Mapping[str, Any]) -> None:
    """On standard output."""
    from rich.console import Console
    from rich.table import Table

    num = max(len(arm["runs"]) for arm in fields["arms"].values())
    seeds = f", mean ± standard deviation over {num} seeds" if num > 1 else ""
    table = Table("", *fields["arms"], title=f"{fields['steps']} steps{seeds}")
    for row in rows(fields):
        table.add_row(*row)
    Console().print(table)
