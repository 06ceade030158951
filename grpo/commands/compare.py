"""`grpo compare PRESET --arm NAME:KEY=VALUE …`: the same training several times with different settings, and what the
difference is: a table, a picture, and every figure as JSON."""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from grpo.configs.errors import SettingsError
from grpo.configs.facts import VARIABLE as VISIBLE_GPUS
from grpo.configs.facts import visible_gpus
from grpo.configs.run import load_run
from grpo.deploy.launcher import checked
from grpo.run import GRPO
from grpo.run_files import SUMMARY_FILE, read
from grpo.transport.cores import available_cores
from grpo.transport.errors import UserError
from grpo.transport.extras import check_installed
from grpo.transport.folders import write_atomic
from grpo.transport.parent import PARENT_VAR

TAKES_OTHERS = True
DEFAULT_FOLDER = "outputs/compare"
COMMANDS_FILE = "commands.json"
"""File in the comparison's folder with the command of each run that was begun, by its folder."""
POLL_S = 0.2
"""How often it is looked whether runs have ended."""
EPILOG = f"""\
An arm's settings are those of the command, and its own KEY=VALUE, with the keys of grpo's command line. --arm with the
same name again adds to it; NAME: alone has nothing of its own. All other options are those of grpo, and hold for all
runs but for arms that have the same key. Arms without a difference are refused. Two comparisons have a name,
and a file can have others:

  --arms async       sync: orch.max_async_level=0, async: orch.max_async_level=1
  --arms ablation    full: as configured, with hints and preference pairs; sdpo: without pairs, replay: without hints,
                     baseline: without both (train.loss.alpha_sdpo=0, train.loss.beta_replay=0)
  --arms FILE.yaml   each arm's settings by their keys, as in  sync: {{orch.max_async_level: 0}}

  grpo compare quickstart --arm sync:orch.max_async_level=0 --arm async:orch.max_async_level=1 --steps 40

Runs are made one after the other. With --jobs 2, two at a time: each has half of the machine's cores, as long as that
is two or more, and half of its GPUs. Comparing times then says less.

Run folders are OUTPUT_DIR/NAME, with --seeds OUTPUT_DIR/NAME/seed_1 and so on. The table goes to standard output, with
means and standard deviations over the seeds; OUTPUT_DIR/{SUMMARY_FILE} has all figures, curves.png rewards and held-out
accuracies. grpo view OUTPUT_DIR shows the timeline of each run. The same command goes on with a comparison that was
interrupted.

exit codes: 0 done, 1 a run failed, 2 settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training of the comparison."""

    arm: str
    seed: int | None
    """None: the configured one."""
    folder: Path
    words: tuple[str, ...]
    """Words of the command line of `grpo`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = "grpo compare PRESET --arm NAME:KEY=VALUE --arm … [--steps N] [--seeds 1,2,3] [options of grpo]"
    parser.add_argument(
        "--arm",
        action="append",
        type=_arm,
        default=[],
        metavar="NAME:KEY=VALUE",
        help="one setting of an arm; may be repeated",
    )
    help_text = "a comparison that has a name, async or ablation, or a YAML file of arms"
    parser.add_argument("--arms", metavar="NAME|FILE", help=help_text)
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of each run (max_steps)")
    parser.add_argument("--seeds", type=_seeds, default=(None,), metavar="1,2,3", help="run every arm with each seed")
    parser.add_argument("--jobs", type=_jobs, default=1, metavar="N", help="so many runs at a time (1)")
    help_text = f"folder for the runs, the table and the pictures ({DEFAULT_FOLDER})"
    parser.add_argument("--output_dir", type=Path, default=Path(DEFAULT_FOLDER), help=help_text)


def _arm(text: str) -> tuple[str, str]:
    name, colon, setting = text.partition(":")
    if not (colon and name.isidentifier()) or (setting and "=" not in setting):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected NAME:KEY=VALUE, as in sync:orch.max_async_level=0")
    return name, setting


def _seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(map(str.isdecimal, parts)) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected different numbers, as in 1,2,3")
    return tuple(map(int, parts))


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected a number of runs, as in 2")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Runs the comparison, and returns the exit code."""
    from grpo.commands.figures import report

    check_installed("plots", "grpo compare")
    arms = arms_of(options.arms, options.arm)
    others = [word for word in options.others if word != "--dry-run"]
    runs = planned(arms, others, folder=options.output_dir, steps=options.steps, seeds=options.seeds)
    _check_settings(runs)
    if len(others) < len(options.others):
        print("\n".join(shlex.join(("grpo", *run.words)) for run in runs))
        return 0
    if 0 < (num_gpus := len(visible_gpus(os.environ))) < options.jobs:
        raise UserError(f"--jobs {options.jobs} on a machine with {num_gpus} GPUs; give each run at least one")
    _check_folders(runs, options.output_dir)
    train(runs, options.jobs)
    report({name: [(run.seed, run.folder) for run in runs if run.arm == name] for name in arms}, options.output_dir)
    return 0


def arms_of(named: str | None, given: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the settings of each arm, as KEY=VALUE: those of the comparison `named`, and those `given`. Raises
    `UserError` for less than two arms."""
    arms: dict[str, list[str]] = {}
    if named == "async":
        arms = {"sync": ["orch.max_async_level=0"], "async": ["orch.max_async_level=1"]}
    elif named == "ablation":
        no_hints, no_pairs = _without("alpha_sdpo", "sdpo"), _without("beta_replay", "dpo")
        arms = {"baseline": no_hints + no_pairs, "sdpo": no_pairs, "replay": no_hints, "full": []}
    elif named is not None:
        arms = _arms_in(Path(named))
    for name, setting in given:
        arms.setdefault(name, []).extend([setting] if setting else [])
    if len(arms) < 2:
        raise UserError(f"{len(arms)} arms; give two or more, as in --arm sync:orch.max_async_level=0, or --arms")
    return arms


def _arms_in(path: Path) -> dict[str, list[str]]:
    """Returns the arms of a YAML file as KEY=VALUE. Raises `UserError`."""
    import yaml

    try:
        arms = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UserError(
            f"--arms {path}: expected async, ablation or a YAML file; it cannot be read: {error}"
        ) from error
    if not isinstance(arms, dict) or not all(
        str(name).isidentifier() and isinstance(own, dict | None) for name, own in arms.items()
    ):
        raise UserError(f"--arms {path}: expected arms with their settings, as in sync: {{orch.max_async_level: 0}}")
    return {name: [f"{key}={_word(value)}" for key, value in (own or {}).items()] for name, own in arms.items()}


def _word(value: object) -> str:
    """Returns a setting's value as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _without(weight: str, section: str) -> list[str]:
    """Returns a weight of 0, and the defaults of the section that has no effect without it."""
    from grpo.configs.loss import LossSettings

    defaults = getattr(LossSettings(), section).model_dump()
    settings = {f"{section}.{key}": "null" if value is None else value for key, value in defaults.items()}
    return [f"train.loss.{key}={value}" for key, value in ({weight: 0} | settings).items()]


def planned(
    arms: Mapping[str, Sequence[str]],
    others: Sequence[str],
    *,
    folder: Path,
    steps: int | None,
    seeds: Sequence[int | None],
) -> list[Training]:
    """Returns all runs, seed by seed and in the order of the arms."""
    runs = []
    common = [*others, *([] if steps is None else [f"--max_steps={steps}"])]
    for seed, (name, settings) in product(seeds, arms.items()):
        own = folder / name if seed is None else folder / name / f"seed_{seed}"
        words = [*_others(common, settings), *(f"--{setting}" for setting in settings), f"--output_dir={own}"]
        words += [] if seed is None else [f"--seed={seed}"]
        runs.append(Training(arm=name, seed=seed, folder=own, words=tuple(words)))
    return runs


def _others(words: Sequence[str], settings: Sequence[str]) -> Iterator[str]:
    """Yields the words of all runs without the keys that an arm sets itself."""
    own, left = {f"--{setting.partition('=')[0]}" for setting in settings}, list(words)
    while left:
        word = left.pop(0)
        if word.partition("=")[0] not in own:
            yield word
        elif "=" not in word and left:
            left.pop(0)


def _check_settings(runs: Sequence[Training]) -> None:
    """Checks the settings of every arm, before the first one is run. Raises `UserError`, also for two equal arms."""
    effective: dict[str, str] = {}
    for run in {run.arm: run for run in runs}.values():
        is_named = bool(run.words) and not run.words[0].startswith("--")
        try:
            plan = checked(load_run(run.words[0] if is_named else None, run.words[is_named:]))
        except (SettingsError, UserError) as error:
            raise UserError(f"arm {run.arm} has settings that cannot be honoured:\n{error}") from error
        settings = plan.effective().replace(str(run.folder), "")
        if same := [arm for arm, one in effective.items() if one == settings]:
            raise UserError(f"arms {same[0]} and {run.arm} have the same settings; give them different ones")
        effective[run.arm] = settings


def _check_folders(runs: Sequence[Training], folder: Path) -> None:
    """Notes the command of each run. Raises `UserError` where a folder has a run of another command, with which
    `grpo` might go on: some settings may change, and make a difference."""
    path = folder / COMMANDS_FILE
    commands = read(path, dict[str, list[str]]) or {}
    for run in runs:
        before = commands.setdefault(str(run.folder), list(run.words))
        if before != list(run.words):
            raise UserError(
                f"{run.folder} has a run of another command: grpo {shlex.join(before)}; give another "
                f"--output_dir, or remove {folder}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(commands, indent=1).encode() + b"\n")


def train(runs: Sequence[Training], jobs: int) -> None:
    """Runs `grpo` for each, `jobs` at a time, which goes on with a run that is there, and passes signals on to them.
    Where one fails, ends the others and exits with its code."""
    waiting, free = [*enumerate(runs, 1)], [*range(jobs)]
    running: dict[subprocess.Popen[bytes], tuple[Training, int]] = {}
    code = 0

    def stop(number: int, _: object = None) -> None:
        nonlocal code
        code = code or 128 + number
        for child in running:
            child.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    while running or (waiting and not code):
        while waiting and free and not code:
            number, run = waiting.pop(0)
            print(f"run {number} of {len(runs)}: {shlex.join(('grpo', *run.words))}", flush=True)
            share = free.pop(0)
            running[_started(run, share, jobs)] = run, share
        time.sleep(POLL_S)
        for child in [child for child in running if child.poll() is not None]:
            run, share = running.pop(child)
            free.append(share)
            if child.returncode:
                print(f"not completed: {run.folder}; the same command goes on with it", file=sys.stderr)
                if not code:
                    code = child.returncode if child.returncode > 0 else 128 - child.returncode
                    stop(signal.SIGTERM)
    for number, handler in before.items():
        signal.signal(number, handler)
    if code:
        raise SystemExit(code)


def _started(run: Training, share: int, jobs: int) -> subprocess.Popen[bytes]:
    """Starts a run with its share of the machine. What several would print at a time goes to files beside their
    folders."""
    cores, gpus, variables = sorted(os.sched_getaffinity(0)), visible_gpus(os.environ), {PARENT_VAR: str(os.getpid())}
    num_cores, num_gpus = available_cores() // jobs, len(gpus) // jobs
    if gpus and jobs > 1:
        variables[VISIBLE_GPUS] = ",".join(gpus[share * num_gpus : (share + 1) * num_gpus])
    with contextlib.ExitStack() as stack:
        output = None
        if jobs > 1:
            log = run.folder.with_suffix(".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(log.open("ab"))
            if num_cores >= 2:
                os.sched_setaffinity(0, cores[share * num_cores : (share + 1) * num_cores])
                stack.callback(os.sched_setaffinity, 0, cores)
        # A group of its own: Ctrl-C reaches it once, through here.
        return subprocess.Popen(
            [*GRPO, *run.words], process_group=0, env=os.environ | variables, stdout=output, stderr=output
        )
