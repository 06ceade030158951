"""`grpo sft`: a supervised first stage. The trainer learns the answers of a file, or the best rollouts of a run, and a
run goes on from its adapter.

The trainer is that of every run; this process sends it batches in the orchestrator's place, by
`orchestrator/supervised.py`.
"""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpo.configs.errors import SettingsError
from grpo.configs.facts import model_facts
from grpo.configs.loading import load, value_at
from grpo.configs.resuming import changes, record_of
from grpo.configs.run import OUTPUTS, folder_name
from grpo.configs.train import TrainSettings
from grpo.deploy.launcher import clear_for_start, explain, launched, make_program
from grpo.deploy.plan import write_program_settings
from grpo.deploy.programs import Program, Signals, run_programs
from grpo.environments.data.files import check_refused, parse_rows
from grpo.notebook import template_arguments
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.messages import messages_of
from grpo.orchestrator.supervised import SupervisedFeed, end_token, examples_of, fitting, rollouts_of
from grpo.policy_version import recorded_arguments
from grpo.transport.batches.channel import open_sender
from grpo.transport.digests import write_digests
from grpo.transport.errors import UserError
from grpo.transport.folders import step_folder
from grpo.transport.hidden import RUN_KEYS, named_keys
from grpo.transport.run import RunFolder, join_run, only_one, open_run
from grpo.transport.weights.identity import resolve_model

TAKES_OTHERS = True
EPILOG = """\
DATA is a file (JSONL, JSON, CSV, Parquet, Arrow) with a prompt and an answer in each row; a prompt is a text, or a list
of chat messages. Or it is the folder of a run with traces, whose rollouts with a reward of at least --min_reward are
learned. All other options are settings of grpo-train, as in `grpo docs settings`:

  grpo sft pairs.jsonl --model configs/quickstart/model --output_dir outputs/sft --epochs 3 --learning_rate 1e-3
  grpo quickstart --train.init_adapter outputs/sft/broadcasts/step_000060

The same command goes on with a stage that was interrupted.

exit codes: 0 done, 1 the trainer failed, 2 data or settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""
_RESTARTS = 3
LEARNING_RATE = {True: 2e-4, False: 2e-5}
"""Default with an adapter and for all weights: ten times those of a run, as is usual."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = "grpo sft DATA --model MODEL [--epochs N] [--batch_size N] [options of grpo-train]"
    parser.add_argument("data", type=Path, help="file with a prompt and an answer in each row, or a run's folder")
    parser.add_argument("--prompt", default="prompt", metavar="COLUMN", help="the prompts' column (prompt)")
    parser.add_argument("--answer", default="answer", metavar="COLUMN", help="the answers' column (answer)")
    parser.add_argument(
        "--min_reward",
        type=float,
        default=1.0,
        metavar="X",
        help="learn only a run's rollouts with at least this reward (1)",
    )
    parser.add_argument("--batch_size", type=_positive, default=64, metavar="N", help="rows of a step (64)")
    parser.add_argument("--epochs", type=_positive, default=1, metavar="N", help="times that each row is learned (1)")
    parser.add_argument(
        "--chat_template_kwargs",
        type=template_arguments,
        default={},
        metavar="JSON",
        help='the chat template\'s arguments, as {"enable_thinking": false}',
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of grpo-train as YAML")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 on")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Learns the file, and returns the exit code."""
    settings = supervised_settings(options.config, options.others, data=options.data)
    model = resolve_model(settings.model)
    arguments = options.chat_template_kwargs
    renderer = ChatRenderer.of_model(model, arguments)
    if options.data.is_dir():
        if arguments:
            raise UserError("--chat_template_kwargs has no effect on a run's rollouts, which are learned as they are")
        arguments = recorded_arguments(options.data)
        found = rollouts_of(options.data, renderer, min_reward=options.min_reward)
    else:
        rows = rows_of(options.data, prompt=options.prompt, answer=options.answer)
        found = examples_of(rows, renderer, end_token(model))
    examples = fitting(found, sequence_len=settings.sequence_len)
    if settings.max_steps == -1:
        num_steps = -(-len(examples) * options.epochs // options.batch_size)
        words = [*options.others, "--max_steps", str(num_steps)]
        settings = supervised_settings(options.config, words, data=options.data)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(only_one(settings.output_dir, "launcher"))
        run = open_run(settings.output_dir, resume=settings.resume, overwrite=settings.overwrite_output_dir)
        clear_for_start(run)
        _record(run, settings.model, arguments)
        transport = settings.rollout_transport.model_dump()
        sender = stack.enter_context(open_sender(run, num_ranks=settings.gpus, **transport))
        feed = SupervisedFeed(examples, settings, run, sender, batch_size=options.batch_size)
        with launched(run) as ended:
            outcome = run_programs([_trainer(settings, run)], restarts=_RESTARTS, signals=signals, tick=feed.tick)
            ended(outcome)
        feed.report()
        if not outcome.exit_code:
            write_digests(run.path, run_id=run.run_id)
    explain(outcome)
    if not outcome.exit_code:
        folder = step_folder(run.broadcasts, settings.max_steps)
        export = f"grpo export {settings.output_dir} makes a model of it"
        print(f"done: {folder}; {f'--train.init_adapter {folder} begins a run with it' if settings.lora else export}")
    return outcome.exit_code


def rows_of(path: Path, *, prompt: str, answer: str) -> list[tuple[list[dict[str, str]], str]]:
    """Returns the messages and the answer of each row. Raises UserError, which names the row that has none."""

    def parsed(row: Mapping[str, Any], _: str) -> tuple[list[dict[str, str]], str]:
        for column in (prompt, answer):
            if column not in row:
                raise ValueError(f"there is no column {column!r}; there are {', '.join(map(str, row)) or 'none'}")
        if not isinstance(text := row[answer], str) or not text.strip():
            raise ValueError(f"{answer} is {text!r:.80}, expected a text")
        return messages_of({"prompt": row[prompt]}), text

    rows, refused = parse_rows([path], parsed)
    check_refused(refused, len(rows))
    return rows


def supervised_settings(file: Path | None, arguments: Sequence[str], *, data: Path) -> TrainSettings:
    """Returns the trainer's settings, with a folder named after `data` and the model, and rows no longer than what
    the model reads, where nothing else is given. Raises `SettingsError`."""
    loaded = load(TrainSettings, file=file, arguments=[*arguments, "--loss.name", "reinforce"])
    keys = sorted(f"loss.{key}" for key in loaded.settings.loss.changed - {"name", "entropy_tau"})
    keys += [key for key in ("noise_scheduler.enabled", "sleep_mode", "colocate") if value_at(loaded.settings, key)]
    if keys:
        raise SettingsError([loaded.problem(key, "has no effect on a supervised stage; remove it") for key in keys])
    settings = loaded.settings
    folder = OUTPUTS / folder_name([data.stem, "sft", Path(settings.model).name])
    facts = model_facts(settings.model)
    longest = min(settings.sequence_len, (facts and facts.positions) or settings.sequence_len)
    left_open = {"learning_rate": LEARNING_RATE[settings.lora], "output_dir": str(folder), "sequence_len": longest}
    return settings.model_copy(update={k: v for k, v in left_open.items() if k not in settings.model_fields_set})


def _record(run: RunFolder, model: str, arguments: Mapping[str, Any]) -> None:
    """Joins the run in the orchestrator's place: who exports, serves or evaluates its versions has the chat template's
    arguments from there. Raises `SettingsError` where the run had others."""
    record = record_of({"model": {"name": model, "chat_template_kwargs": dict(arguments)}})
    compare = partial(changes, "orch", now=record, run=run.path)
    join_run(run.path, role="orch", record=record, compare=compare, timeout_s=1.0)


def _trainer(settings: TrainSettings, run: RunFolder) -> Program:
    """Returns grpo-train with these settings, which are written to the run's folder."""
    goes_on = {"run_id": run.run_id, "resume": "auto", "overwrite_output_dir": False}
    file = write_program_settings(settings.model_copy(update=goes_on), run.path / "settings", "train")
    return make_program("train", file, run, without=RUN_KEYS - named_keys(settings.model_dump()))
