"""`grpo sft`: a supervised first stage. The trainer learns the answers of a file, or the best rollouts of a run, and a
run goes on from its adapter.

The trainer is that of every run; this process takes the orchestrator's place and sends it batches. With advantages of 1
and a ratio of 1 (`loss.name: reinforce`) the policy loss is the cross-entropy of the answers' tokens.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from grpo.configs.errors import SettingsError
from grpo.configs.loading import load, value_at
from grpo.configs.train import TrainSettings
from grpo.deploy.launcher import explain, launched
from grpo.deploy.programs import Program, Signals, run_programs
from grpo.environments.data.files import check_refused, parse_rows
from grpo.orchestrator.packing import pack
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.messages import messages_of
from grpo.run_files import STEP
from grpo.transport.batches.channel import open_sender
from grpo.transport.batches.filesystem import BatchSender
from grpo.transport.batches.store import StepStore
from grpo.transport.checkpoints import Checkpoints
from grpo.transport.errors import UserError
from grpo.transport.folders import step_folder, steps_in, write_atomic
from grpo.transport.hidden import key_variables
from grpo.transport.records import TrainingSample
from grpo.transport.run import RunFolder, only_one, open_run
from grpo.transport.traces import FOLDER, VOCABULARY_FILE
from grpo.transport.weights.identity import resolve_model
from grpo.transport.weights.store import METRICS_FILE

TAKES_OTHERS = True
EPILOG = """\
DATA is a file (JSONL, JSON, CSV, Parquet, Arrow) with a prompt and an answer in each row; a prompt is a text, or a list
of chat messages. Or it is the folder of a run with traces, whose rollouts with a reward of at least --min_reward are
learned. All other options are settings of grpo-train, as in docs/settings.md:

  grpo sft pairs.jsonl --model configs/quickstart/model --output_dir outputs/sft --epochs 3 --learning_rate 1e-3
  grpo quickstart --train.init_adapter outputs/sft/broadcasts/step_000060

The same command goes on with a stage that was interrupted.

exit codes: 0 done, 1 the trainer failed, 2 data or settings that cannot be honoured, 130 Ctrl-C, 143 SIGTERM"""
_AHEAD = 4
"""Batches that wait for the trainer, at most."""
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class Example:
    """One row as tokens."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True for what is learned."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command."""
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
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of grpo-train as YAML")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number from 1 on")
    return int(text)


def main(options: argparse.Namespace) -> int:
    """Learns the file, and returns the exit code."""
    settings = settings_of(options.config, options.others)
    model = resolve_model(settings.model)
    if options.data.is_dir():
        found = rollouts_of(options.data, ChatRenderer.of_model(model), min_reward=options.min_reward)
    else:
        found = examples_of(rows_of(options.data, prompt=options.prompt, answer=options.answer), model)
    examples = fitting(found, sequence_len=settings.sequence_len)
    if settings.max_steps == -1:
        num_steps = -(-len(examples) * options.epochs // options.batch_size)
        settings = settings_of(options.config, [*options.others, "--max_steps", str(num_steps)])
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(only_one(settings.output_dir, "launcher"))
        run = open_run(settings.output_dir, resume=settings.resume, overwrite=settings.overwrite_output_dir)
        StepStore(run.batches, run_id=run.run_id).remove_finished()
        transport = settings.rollout_transport.model_dump()
        sender = stack.enter_context(open_sender(run, num_ranks=settings.gpus, **transport))
        feed = Feed(examples, settings, run, sender, batch_size=options.batch_size)
        programs = [_trainer(settings, run)]
        with launched(run) as ended:
            outcome = run_programs(programs, restarts=_RESTARTS, signals=signals, tick=feed.tick)
            ended(outcome)
        feed.tell()
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


def settings_of(file: Path | None, arguments: Sequence[str]) -> TrainSettings:
    """Returns the trainer's settings. Raises `SettingsError`."""
    loaded = load(TrainSettings, file=file, arguments=[*arguments, "--loss.name", "reinforce"])
    keys = sorted(f"loss.{key}" for key in loaded.settings.loss.changed - {"name", "entropy_tau"})
    keys += [key for key in ("noise_scheduler.enabled", "sleep_mode", "colocate") if value_at(loaded.settings, key)]
    if keys:
        raise SettingsError([loaded.problem(key, "has no effect on a supervised stage; remove it") for key in keys])
    return loaded.settings


def examples_of(rows: Sequence[tuple[list[dict[str, str]], str]], model: Path) -> list[Example]:
    """Returns the rows as tokens: the prompt as a run will ask it, the answer with the token that ends a turn."""
    renderer, end = ChatRenderer.of_model(model), end_token(model)
    examples = []
    for messages, text in rows:
        prompt, answer = renderer.prompt_ids(tuple(messages)), [*renderer.ids_of(text), end]
        examples.append(Example([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    return examples


def rollouts_of(run: Path, renderer: ChatRenderer, *, min_reward: float) -> list[Example]:
    """Returns the rollouts of a run's training steps that have at least this reward, each once, whoever sampled them;
    what was sampled is learned. Raises UserError for a run without traces or such, or of another tokenizer."""
    try:
        known = pq.read_table(run / FOLDER / VOCABULARY_FILE)["text"].to_pylist()
    except OSError as error:
        raise UserError(f"{run} is no run with traces: {error}; give a file, or a run that keeps traces") from error
    if known != renderer.vocabulary():
        raise UserError(f"the run in {run} has another tokenizer than this model; give a file with texts")
    found: dict[bytes, Example] = {}
    for path in sorted((run / FOLDER).glob("step_*.parquet")):
        table = pq.read_table(path, columns=["reward", "token_ids", "loss_mask"])
        for row in table.filter(pc.greater_equal(table["reward"], min_reward)).to_pylist():
            if any(row["loss_mask"]):
                ids = np.array(row["token_ids"], np.int32)
                found.setdefault(ids.tobytes(), Example(row["token_ids"], row["loss_mask"]))
    if not found:
        raise UserError(f"no rollout of {run} has a reward of {min_reward:g} or more; lower --min_reward")
    print(f"{len(found)} different rollouts with a reward of {min_reward:g} or more")
    return list(found.values())


def fitting(examples: Sequence[Example], *, sequence_len: int) -> list[Example]:
    """Returns those that are not longer than `sequence_len`, and prints how many are. Raises UserError where all
    are."""
    kept = [one for one in examples if len(one.token_ids) <= sequence_len]
    if len(kept) < len(examples):
        print(f"{len(examples) - len(kept)} of {len(examples)} rows are longer than sequence_len = {sequence_len}")
    if not kept:
        longest = max(len(one.token_ids) for one in examples)
        raise UserError(f"no row fits into sequence_len = {sequence_len}; the longest has {longest} tokens")
    return kept


def end_token(model: Path) -> int:
    """The token at which servers end an answer of the model. Raises UserError where it names none."""
    for name in ("generation_config.json", "config.json"):
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((model / name).read_bytes()).get("eos_token_id")
            if isinstance(found, list) and found:
                found = found[0]
            if isinstance(found, int):
                return found
    raise UserError(f"{model} names no eos_token_id in generation_config.json or config.json, which ends an answer")


class Feed:
    """Sends the trainer its batches, and tells of its steps."""

    def __init__(
        self,
        examples: Sequence[Example],
        settings: TrainSettings,
        run: RunFolder,
        sender: BatchSender,
        *,
        batch_size: int,
    ) -> None:
        self._examples, self._settings, self._run, self._sender = examples, settings, run, sender
        self._batch_size, self._sent = batch_size, Checkpoints(run).settle()
        self._told = max(steps_in(run.broadcasts), default=0)
        self._finished = False

    def tick(self) -> None:
        """Is called often: sends batches while few wait, and tells of versions that are new."""
        while self._sent < self._settings.max_steps and self._sent - self._sender.received() < _AHEAD:
            self._sent += 1
            samples = [sample_of(one, step=self._sent, number=n) for n, one in enumerate(self._batch(self._sent))]
            place: dict[str, Any] = {"run_id": self._run.run_id, "step": self._sent, "num_ranks": self._settings.gpus}
            self._sender.send(self._sent, pack(samples, seq_len=self._settings.sequence_len, **place))
        if self._sent >= self._settings.max_steps and not self._finished:
            self._sender.finish(self._settings.max_steps)
            self._finished = True
        self.tell()

    def tell(self) -> None:
        """Prints a line for each new version, and adds it to metrics.jsonl."""
        for step in (step for step in steps_in(self._run.broadcasts) if step > self._told):
            self._told = step
            with contextlib.suppress(OSError):  # it may be removed already
                metrics = json.loads((step_folder(self._run.broadcasts, step) / METRICS_FILE).read_bytes())
                with (self._run.path / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({STEP: step, **metrics}) + "\n")
                print(
                    f"step {step}/{self._settings.max_steps}: loss {metrics['loss/total']:.4f} nats a token, "
                    f"{metrics['perf/train_tokens_per_s']:,.0f} tokens/s",
                    flush=True,
                )

    def _batch(self, step: int) -> list[Example]:
        """The rows of one step: each epoch has an order of its own, which the seed determines."""
        numbers, length = range((step - 1) * self._batch_size, step * self._batch_size), len(self._examples)
        places = (divmod(number, length) for number in numbers)
        return [self._examples[int(_order(self._settings.seed, epoch, length)[place])] for epoch, place in places]


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, length: int) -> Any:
    """[length] a permutation."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def sample_of(example: Example, *, step: int, number: int) -> TrainingSample:
    """Returns a row as what a policy sampled, with an advantage of 1 for each token that is learned."""
    length = len(example.token_ids)
    return TrainingSample(
        token_ids=np.array(example.token_ids, np.int32),
        loss_mask=np.array(example.loss_mask, np.bool_),
        inference_logprobs=np.zeros(length, np.float32),
        advantages=1.0,
        temperatures=1.0,
        policy_versions=((step - 1, length),),
        env="sft",
        group_id=f"{step}",
        rollout_id=f"{step}/{number}",
        reward=0.0,
        stop_reason="stop",
    )


def _trainer(settings: TrainSettings, run: RunFolder) -> Program:
    """grpo-train, with the settings in the run's folder."""
    for folder in (run.path / "settings", run.status, run.logs):
        folder.mkdir(exist_ok=True)
    goes_on = {"run_id": run.run_id, "resume": "auto", "overwrite_output_dir": False}
    given = settings.model_copy(update=goes_on).model_dump(mode="json", exclude_unset=True)
    file = run.path / "settings" / "train.yaml"
    write_atomic(file, yaml.safe_dump(given, sort_keys=False).encode(), durable=False, private=True)
    hidden = key_variables(settings.model_dump()) | {k for k in os.environ if k.startswith("GRPO_TRAIN_")}
    return Program(
        role="train",
        command=(sys.executable, "-P", "-m", "grpo.trainer.cli", str(file)),
        log=run.logs / "train.log",
        status=run.status / "train.json",
        environment={k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONUNBUFFERED": "1"},
    )
