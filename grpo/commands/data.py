"""`grpo data PATH`: what a data set would ask the policy, how long that is, and which rows cannot be used."""

import argparse
import contextlib
import inspect
import logging
import os
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.configs.orch import OrchSettings
from grpo.configs.run import load_part, presets
from grpo.environments.data.dataset import Dataset
from grpo.environments.data.files import Refused
from grpo.environments.sandbox.records import SandboxMissing
from grpo.notebook import template_arguments, yaml_value
from grpo.orchestrator.renderer import ChatRenderer
from grpo.orchestrator.rollouts.messages import messages_of
from grpo.transport.errors import UserError
from grpo.transport.logs import printable
from grpo.transport.weights.chat_template import unused_arguments
from grpo.transport.weights.identity import resolve_model

MAX_SHOWN = 4_000
"""Characters of a prompt, and of an answer, that are shown."""
MAX_COUNTED = 20_000
"""Prompts whose tokens are counted, evenly spread."""
ARGUMENTS = [name for name in inspect.signature(Dataset).parameters if name != "path"]
EPILOG = f"""\
PATH is a file (JSONL, JSON, CSV, Parquet, Arrow), a folder of such, OWNER/NAME of the Hugging Face Hub (downloaded
before), or a run whose settings have the environment `dataset`: a preset, or a folder or file with run.yaml. The
environment's own arguments are options too:

{textwrap.fill(", ".join(f"--{name}" for name in ARGUMENTS), 110, initial_indent="  ", subsequent_indent="  ")}

  grpo data sums.csv --prompt "What is {{sum}}?" --answer result --reward number --model configs/quickstart/model

exit codes: 0 all rows can be used, 1 some cannot, 2 the data or the options cannot be used"""
NOT_TEXTS = {"reward", "parser", "eval_fraction", "seed", "skip_refused"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("path", help="the data, or a run that has some")
    parser.add_argument("--model", help="the model whose chat template and tokenizer are used; a run has its own")
    parser.add_argument(
        "--chat_template_kwargs",
        type=template_arguments,
        help="the chat template's arguments as JSON; a run has its own",
    )
    parser.add_argument("--max_prompt_length", type=int, help="longest prompt in tokens, as buffer.max_prompt_length")
    parser.add_argument("--rows", type=int, default=3, help="rows that are shown as they are asked (3)")
    parser.add_argument("--show", type=int, default=20, help="how many refused or skipped rows to list (20)")
    for name in ARGUMENTS:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, type=yaml_value if name in NOT_TEXTS else str)


def main(options: argparse.Namespace) -> int:
    """Prints the data set of each environment, and returns the exit code."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
    asked, model, arguments, longest = _asked(options)
    if options.model is not None and not options.chat_template_kwargs:  # a run's are those of its own model
        unused, _ = unused_arguments(resolve_model(options.model), arguments)
        arguments = {name: value for name, value in arguments.items() if name not in unused}
    renderer, code = _renderer(model, arguments, needed=options.model is not None), 0
    for args in asked:
        try:
            with _without_warnings():
                dataset = Dataset(**{**args, "skip_refused": True})
        except (TypeError, ValueError, SandboxMissing, OSError) as error:
            raise UserError(str(error)) from error
        print(printable("\n".join(_report(dataset, args["path"], renderer, longest, options))))
        code = max(code, 0 if not dataset.loaded.refused else 1 if dataset.loaded.examples["train"] else 2)
    return code


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Within it environments log errors alone: the rows that are left out are printed anyway."""
    logger = logging.getLogger("grpo.environments")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _asked(
    options: argparse.Namespace,
) -> tuple[Sequence[Mapping[str, Any]], str | None, Mapping[str, Any], int | None]:
    """The arguments of each data set, the model, the arguments of its chat template, and the longest prompt."""
    args = {name: value for name in ARGUMENTS if (value := getattr(options, name)) is not None}
    path = Path(options.path)
    if options.path not in presets() and not (path / "run.yaml").is_file() and path.suffix not in (".yaml", ".yml"):
        if options.chat_template_kwargs and options.model is None:
            raise UserError("--chat_template_kwargs has no effect without --model, whose chat template is meant")
        return (
            [{"path": options.path, **args}],
            options.model,
            options.chat_template_kwargs or {},
            options.max_prompt_length,
        )
    settings = load_part(OrchSettings, options.path, [])
    asked: list[Mapping[str, Any]] = [{**env.args, **args} for env in settings.env if env.id == "dataset"]
    if not asked:
        raise UserError(
            f"{options.path} has no environment dataset; it has {', '.join(env.id for env in settings.env)}"
        )
    longest = options.max_prompt_length or settings.buffer.max_prompt_length
    arguments = options.chat_template_kwargs or settings.model.chat_template_kwargs
    return asked, options.model or settings.model.name, arguments, longest


def _renderer(model: str | None, arguments: Mapping[str, Any], *, needed: bool) -> ChatRenderer | None:
    """None where the model is not on this machine."""
    try:
        return None if model is None else ChatRenderer.of_model(resolve_model(model), arguments)
    except FileNotFoundError:
        if needed:
            raise
        return None


def _report(
    dataset: Dataset, path: str, renderer: ChatRenderer | None, longest: int | None, options: argparse.Namespace
) -> Iterator[str]:
    loaded = dataset.loaded
    train, held_out = loaded.examples["train"], loaded.examples["eval"]
    yield f"{path}: {len(train):,} prompts to train on, {len(held_out):,} to evaluate on"
    for example in train[: options.rows]:
        yield f"\n{_cut(_rendered(example, renderer))}"
        if "answer" in example:
            yield f"[answer] {_cut(str(example['answer']))}"
    if train:
        yield f"\n{_lengths([*train, *held_out], renderer, longest)}"
    yield from _rows("refused", loaded.refused, options.show)
    yield from _rows("left out, which say nothing new", loaded.duplicates, options.show)


def _cut(text: str) -> str:
    """A text as it is shown: its beginning, where it is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} … ({len(text):,} characters)"


def _rendered(example: Mapping[str, Any], renderer: ChatRenderer | None) -> str:
    """Returns the prompt as the policy reads it."""
    messages = tuple(messages_of(example))
    if renderer is None:
        return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
    return renderer.raw_text(renderer.prompt_ids(messages))


def _lengths(examples: Sequence[Mapping[str, Any]], renderer: ChatRenderer | None, longest: int | None) -> str:
    counted = examples[:: -(-len(examples) // MAX_COUNTED)]
    if renderer is None:
        unit, lengths = "characters", [sum(len(one["content"]) for one in messages_of(each)) for each in counted]
    else:
        unit, lengths = "tokens", [len(renderer.prompt_ids(tuple(messages_of(each)))) for each in counted]
    told = f"{unit} of a prompt: median {statistics.median(lengths):,.0f}, longest {max(lengths):,}"
    if len(counted) < len(examples):
        told += f" (of {len(counted):,} prompts)"
    if renderer is None:
        return f"{told}; with --model MODEL in tokens"
    if longest is not None:
        told += f"; {sum(length > longest for length in lengths):,} have more than max_prompt_length = {longest}"
    return told


def _rows(what: str, rows: Sequence[Refused], show: int) -> Iterator[str]:
    if rows:
        yield f"\n{len(rows):,} {what}:"
        yield from (f"  {row.place}: {row.why}" for row in rows[:show])
        if len(rows) > show:
            yield f"  and {len(rows) - show:,} more (--show)"
