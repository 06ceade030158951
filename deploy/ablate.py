"""`grpo ablate FOLDER`: the same training with and without hints and preference pairs, and what each adds."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.arguments import Arguments, parse
from deploy.compare import CannotCompare, RunFailed, exit_code_of, make_parser, with_options, with_steps, write_report
from deploy.plan import Plan

if TYPE_CHECKING:
    from configs.errors import Problem

DEFAULT_FOLDER = "outputs/ablate"
REPORT_FILE = "ablate.json"
ALPHA, BETA = 0.1, 0.05
"""Weights of hints and of pairs in the arms that have them, where neither settings nor command line say them."""
ARMS = {"baseline": (False, False), "sdpo": (True, False), "replay": (False, True), "full": (True, True)}
"""Whether an arm has hints, and whether it has pairs."""
_ANEW = {
    "train": ("run_id", "overwrite_output_dir", "num_threads", "rollout_transport.port"),
    "infer": ("port", "num_threads", "gpu_memory_utilization"),
    "orch": ("run_id", "client.base_url", "teacher_model.client.base_url", "rollout_transport.port"),
    "teacher": ("port", "num_threads", "max_model_len"),
}
"""What the launcher may choose anew when the same training is run again."""
_EPILOG = f"""\
All other options are those of grpo, and hold for all runs; see grpo --help. The arms, one after the other:
  baseline   loss.alpha_sdpo 0, loss.beta_replay 0
  sdpo       hints: loss.alpha_sdpo as configured, or {ALPHA:g}
  replay     preference pairs: loss.beta_replay as configured, or {BETA:g}
  full       both
All have the same seeds and steps and whatever else is configured; without their weight, loss.sdpo and loss.dpo are left
out. An arm's run folder is OUTPUT_DIR/baseline and so on, with --seeds OUTPUT_DIR/baseline/seed_1 and so on.

A run that is complete and had the same settings is not made again, so that the same command goes on with an ablation
that was interrupted; with --overwrite_output_dir all are made again.

The table goes to standard output, all figures to OUTPUT_DIR/{REPORT_FILE}; the last line is these as one JSON object.

exit codes: 0 done, 1 a run failed, 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of the ablation."""

    arm: str
    seed: int | None
    """None: those that are configured."""
    plan: Plan

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.plan.output_dir

    def __str__(self) -> str:
        loss, seed = self.plan.train.loss, "" if self.seed is None else f", seed {self.seed}"
        return f"{self.arm} (alpha_sdpo {loss.alpha_sdpo:g}, beta_replay {loss.beta_replay:g}{seed}) in {self.folder}"


def main(argv: Sequence[str]) -> int:
    """`grpo ablate`; the exit code."""
    parser = make_parser(
        "ablate",
        description="Trains four times from the same settings: without hints and pairs, with either, with both.",
        epilog=_EPILOG,
        own_usage="[--alpha A] [--beta B] [--seeds 1,2,3]",
        output_dir=DEFAULT_FOLDER,
    )
    parser.add_argument("--alpha", type=_weight, metavar="A", help="loss.alpha_sdpo of the arms with hints")
    parser.add_argument("--beta", type=_weight, metavar="B", help="loss.beta_replay of the arms with pairs")
    parser.add_argument("--seeds", type=_seeds, default=(None,), metavar="1,2,3", help="run each arm with each of them")
    own, others = parser.parse_known_args(argv)

    def work() -> None:
        arguments = parse(with_steps(others, own.steps))
        runs = planned(arguments, own.output_dir, alpha=own.alpha, beta=own.beta, seeds=own.seeds)
        if arguments.dry_run:
            print("\n".join(str(run) for run in runs))
        else:
            _ablate(runs, own.output_dir)

    return exit_code_of(work)


def _weight(text: str) -> float:
    weight = float(text)
    if not 0 < weight < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, the weight of the arms that have it")
    return weight


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text}: expected different seeds")
    return seeds


# --- what is run ---


def planned(
    arguments: Arguments, folder: Path, *, alpha: float | None, beta: float | None, seeds: Sequence[int | None]
) -> list[Run]:
    """All runs, seed by seed and in the order of `ARMS`. Raises `CannotCompare`; exits with the problems of settings
    that any of them cannot honour."""
    given = {"loss.alpha_sdpo": alpha, "loss.beta_replay": beta}
    arguments = with_options(arguments, "train", {key: weight for key, weight in given.items() if weight is not None})
    loss = _resolved(arguments).train.loss
    weights = {"loss.alpha_sdpo": loss.alpha_sdpo or ALPHA, "loss.beta_replay": loss.beta_replay or BETA}
    full = _resolved(with_options(arguments, "train", weights))
    if full.orch.max_steps is None:
        raise CannotCompare("the runs need an end; give --steps N")
    if full.resume_step is not None:
        raise CannotCompare(f"resume_step is {full.resume_step}, and each run is a new one; remove it")
    runs = []
    for seed, arm in product(seeds, ARMS):
        own = folder / arm if seed is None else folder / arm / f"seed_{seed}"
        runs.append(Run(arm=arm, seed=seed, plan=_with_seed(_of_arm(full, arm, own), seed)))
    _check(runs[: len(ARMS)])
    return runs


def _resolved(arguments: Arguments) -> Plan:
    from configs.common import exit_with_problems
    from configs.errors import SettingsError
    from deploy.plan import resolve

    try:
        return resolve(arguments)
    except SettingsError as error:
        exit_with_problems(error)


def _of_arm(full: Plan, arm: str, folder: Path) -> Plan:
    """The settings of an arm: those of the full one, without the weights that it does not have and what needs them."""
    loss = full.train.loss.model_dump(exclude_unset=True)
    for has, weight, section in zip(ARMS[arm], ("alpha_sdpo", "beta_replay"), ("sdpo", "dpo"), strict=True):
        if not has:
            loss[weight] = 0.0
            loss.pop(section, None)
    own: dict[str, Any] = {"output_dir": str(folder)}
    teacher = None
    if full.teacher is not None:
        teacher = full.teacher.model_copy(update={"output_dir": str(folder / "teacher")})
    return replace(
        full,
        train=full.train.model_copy(update=own | {"loss": type(full.train.loss).model_validate(loss)}),
        infer=full.infer.model_copy(update=own),
        orch=full.orch.model_copy(update=own),
        teacher=teacher,
    )


def _with_seed(plan: Plan, seed: int | None) -> Plan:
    if seed is None:
        return plan
    own: dict[str, Any] = {"seed": seed}
    orch = dict(own)
    if plan.orch.buffer.seed is not None:
        orch["buffer"] = plan.orch.buffer.model_copy(update=own)
    return replace(
        plan,
        train=plan.train.model_copy(update=own),
        infer=plan.infer.model_copy(update=own),
        orch=plan.orch.model_copy(update=orch),
    )


def _check(runs: Sequence[Run]) -> None:
    """Exits with the problems of arms whose settings contradict each other, before any of them is run."""
    from configs.common import Loaded, exit_with_problems
    from configs.cross import cross_check
    from configs.errors import Problem, SettingsError

    problems: list[Problem] = []
    for run in runs:
        file = f"arm {run.arm}"
        train = Loaded(settings=run.plan.train, origins={}, file=file)
        problems += [train.problem(key, message) for key, message in run.plan.train.conflicts()]
        try:
            cross_check(
                train,
                Loaded(settings=run.plan.infer, origins={}, file=file),
                Loaded(settings=run.plan.orch, origins={}, file=file),
            )
        except SettingsError as error:
            problems += error.problems
    if not problems:
        problems = list(_without_errors(runs))
    if problems:
        exit_with_problems(SettingsError(problems))


def _without_errors(runs: Sequence[Run]) -> "Iterator[Problem]":
    """The first arm with hints, where no environment marks errors. Raises `CannotCompare`."""
    from configs.common import Loaded
    from deploy.single_questions import only_single_questions

    run = next(run for run in runs if run.plan.train.loss.alpha_sdpo)
    if only_single_questions(run.plan.orch):
        yield Loaded(settings=run.plan.train, origins={}, file=f"arm {run.arm}").problem(
            "loss.alpha_sdpo",
            "is above 0, and no environment marks errors: all are single questions, for which there are no hints; take "
            "an environment of episodes",
        )


# --- running them ---


def _ablate(runs: Sequence[Run], folder: Path) -> None:
    from deploy.ablation_table import fields_of, print_table

    waiting = [(run, plan) for run in runs if (plan := _to_be_run(run)) is not None]
    for number, (run, plan) in enumerate(waiting, 1):
        print(f"run {number} of {len(waiting)}: {run}", flush=True)
        _train(run, plan)
    fields = fields_of([(run.arm, run.seed, run.plan) for run in runs])
    write_report(folder / REPORT_FILE, fields)
    print_table(fields)
    print(f"all figures are in {folder / REPORT_FILE}")
    print(json.dumps(fields))


def _to_be_run(run: Run) -> Plan | None:
    """With what the run is made; None where it is complete. Raises `CannotCompare` for a folder with another run."""
    from transport.run import RUN_FILE

    if run.plan.train.overwrite_output_dir or not (run.folder / RUN_FILE).exists():
        return run.plan
    if not _as_before(run):
        raise CannotCompare(
            f"{run.folder} holds a run with other settings; give another --output_dir, or --overwrite_output_dir to "
            "make all runs again"
        )
    if _is_complete(run):
        print(f"complete already: {run}", flush=True)
        return None
    print(f"was not completed, and is made again: {run}", flush=True)
    return replace(run.plan, train=run.plan.train.model_copy(update={"overwrite_output_dir": True}))


def _as_before(run: Run) -> bool:
    """Whether the run in the folder was started with these settings."""
    import yaml

    for role, settings in run.plan.settings().items():
        try:
            before = yaml.safe_load((run.folder / "settings" / f"{role}.yaml").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        now = settings.model_dump(mode="json", exclude_unset=True)
        if _lasting(role, before) != _lasting(role, now):
            return False
    return True


def _lasting(role: str, settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of a program without those of `_ANEW`, and without sections that are empty then."""
    kept = {}
    for name, value in settings.items():
        key = prefix + name
        if key in _ANEW[role]:
            continue
        if isinstance(value, Mapping) and any(one.startswith(f"{key}.") for one in _ANEW[role]):
            value = _lasting(role, value, f"{key}.")
            if not value:
                continue
        kept[name] = value
    return kept


def _is_complete(run: Run) -> bool:
    try:
        summary = json.loads((run.folder / "summary.json").read_bytes())
    except FileNotFoundError:
        return False
    return bool(summary["steps"] == run.plan.orch.max_steps)


def _train(run: Run, plan: Plan) -> None:
    from deploy.launcher import run_plan
    from deploy.progress import shown

    if exit_code := run_plan(plan, shown):
        again = "once what ended it is mended, the same command makes this run again, and none that is complete"
        print(f"not completed: {run}; {again}", flush=True)
        raise RunFailed(exit_code)
