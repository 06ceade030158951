"""`grpo ledger RUN`: what became of a prompt, a group, a rollout, and what trained a step."""

import argparse
import json
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from grpo.orchestrator.ledger import LEDGER_FILE, RolloutRow
from grpo.orchestrator.ledger_reader import LedgerReader, open_ledger
from grpo.run_files import orch_settings, read_run
from grpo.transport.errors import UserError
from grpo.transport.logs import printable

_LARGEST = 2**63 - 1
EPILOG = """\
states: issued, scored (has its reward), shipping (about to leave for the trainer), shipped, trained, dropped (with a
reason). whether it agrees with itself and with other files: grpo prove RUN. exit codes: 0 done; 1 what was asked
for is not in the ledger; 2 there is no ledger, or the command line is wrong"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer in both forms that can be printed."""

    text: str
    fields: Mapping[str, Any]
    exit_code: int = 0


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--group", metavar="N", type=_number, help="one group: the rollouts of one prompt")
    question.add_argument("--rollout", metavar="N/M", type=_rollout, help="one rollout")
    question.add_argument("--step", metavar="N", type=_number, help="what trained step N")
    question.add_argument("--example", metavar="ENV/I", type=_example, help="every group of example I, from 0")
    question.add_argument("--prompt", metavar="TEXT", help="the same for each training prompt that contains TEXT")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text[:40]}: expected a number from 0 to {_LARGEST}")
    return int(text)


def _rollout(text: str) -> tuple[int, int]:
    group, _, number = text.partition("/")
    if not (group.isdecimal() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected GROUP/NUMBER, as in 17/3")
    return _number(group), _number(number)


def _example(text: str) -> tuple[str, int]:
    env, _, number = text.rpartition("/")
    if not (env and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected ENV/NUMBER, as in reverse-text/12")
    return env, _number(number)


def main(options: argparse.Namespace) -> int:
    """Prints the answer, and returns the exit code."""
    try:
        with open_ledger(options.run) as ledger:
            answer = _answer(options, ledger)
    except sqlite3.OperationalError as error:
        raise UserError(f"{options.run / LEDGER_FILE} cannot be read now: {error}; try again") from error
    print(json.dumps(answer.fields, indent=1) if options.json else printable(answer.text))
    return answer.exit_code


def _answer(options: argparse.Namespace, ledger: LedgerReader) -> Answer:
    if options.group is not None:
        return of_rollouts(ledger.rollouts(group_id=options.group), f"group {options.group}")
    if options.rollout is not None:
        group, number = options.rollout
        return of_rollouts(ledger.rollouts(group_id=group, number=number), f"rollout {group}/{number}")
    if options.step is not None:
        return of_rollouts(ledger.rollouts(step=options.step), f"step {options.step}")
    if options.example is not None:
        return of_example(ledger, *options.example)
    if options.prompt is not None:
        return of_prompts(ledger, find_prompts(options.run, options.prompt))
    return totals(ledger)


# --- questions ---


def states_of(fates: Counter[tuple[str, str | None]]) -> Counter[str]:
    """Returns the number of rollouts by state."""
    states = Counter[str]()
    for (state, _), num in fates.items():
        states[state] += num
    return states


def totals(ledger: LedgerReader) -> Answer:
    """Returns how many rollouts are in which state, and why they were dropped."""
    fates, groups, step = ledger.fates(), ledger.num_groups(), ledger.newest_step()
    states, num = states_of(fates), fates.total()
    dropped = Counter({str(reason): count for (state, reason), count in fates.items() if state == "dropped"})
    lines = [f"{num:,} rollouts in {groups:,} groups, up to step {step or 0}"]
    lines += [f"  {state:10} {count:>12,}" for state, count in sorted(states.items())]
    lines += [f"    {reason:20} {count:,}" for reason, count in dropped.most_common()]
    return Answer(
        text="\n".join(lines),
        fields={"rollouts": num, "groups": groups, "step": step, "states": states, "dropped": dropped},
    )


def of_rollouts(rows: Sequence[RolloutRow], what: str) -> Answer:
    """Returns a line for each rollout, below their totals."""
    if not rows:
        return Answer(text=f"{what} is not in the ledger", fields={"rollouts": []}, exit_code=1)
    rewards = [row.reward for row in rows if row.reward is not None]
    together = {
        "groups": len({row.group_id for row in rows}),
        "states": dict(Counter(row.state for row in rows)),
        "environments": dict(Counter(row.env for row in rows)),
        "mean_reward": statistics.fmean(rewards) if rewards else None,
        "sampled_tokens": sum(row.num_tokens or 0 for row in rows),
        "lags": dict(Counter(str(row.lag) for row in rows if row.lag is not None)),
    }
    heading = f"{what}: {len(rows)} rollouts; " + "; ".join(f"{name} {value}" for name, value in together.items())
    width = max(len(row.id) for row in rows)
    lines = [heading, *(f"  {row.id:{width}}  {_line(row)}" for row in rows)]
    listed = [{"id": row.id, **msgspec.structs.asdict(row), "lag": row.lag} for row in rows]
    return Answer(text="\n".join(lines), fields=together | {"rollouts": listed})


def of_example(ledger: LedgerReader, env: str, example: int, prompt: str | None = None) -> Answer:
    """Returns the fates of every group that asked an example. `prompt` is its text, where it is known."""
    what = f"example {example} of {env}" + ("" if prompt is None else f" ({prompt})")
    answer = of_rollouts(ledger.rollouts(env=env, example=example), what)
    return replace(answer, fields={"env": env, "example": example, "prompt": prompt, **answer.fields})


def of_prompts(ledger: LedgerReader, prompts: Sequence[tuple[str, int, str]]) -> Answer:
    """Returns the fates of each prompt, which is environment, example and text."""
    answers = [of_example(ledger, *prompt) for prompt in prompts]
    text, fields = "\n".join(one.text for one in answers), {"prompts": [one.fields for one in answers]}
    return Answer(text=text, fields=fields, exit_code=min(one.exit_code for one in answers))


def find_prompts(folder: Path, text: str) -> list[tuple[str, int, str]]:
    """Returns environment, number and prompt of the training examples whose prompt contains `text`. Constructs the
    run's environments from the settings in `run.json`, and reads their training split. Raises `UserError`."""
    from grpo.orchestrator.rollouts.registry import make_environment

    found: list[tuple[str, int, str]] = []
    for env in orch_settings(read_run(folder)).get("env", []):
        try:
            examples = make_environment(env["id"], env["args"]).dataset("train")
        except Exception as error:
            message = f"environment {env.get('id')} cannot be constructed here: {error}; give --example ENV/NUMBER"
            raise UserError(message) from error
        for index in range(len(examples)):
            prompt = examples[index]["prompt"]
            content = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
            if text in content:
                found.append((env.get("name") or env["id"], index, content))
    if not found:
        raise UserError(f"no training prompt contains {text!r}")
    return found


# --- as text ---


def _line(row: RolloutRow) -> str:
    fate = row.state if row.reason is None else f"{row.state}: {row.reason}"
    fate += "" if row.step is None else f" in step {row.step}, lag {row.lag}"
    reward = "no reward" if row.reward is None else f"reward {row.reward:.4g}, {row.num_tokens} tokens"
    issued = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.issued_at))
    times = f"issued {issued}, {row.state} {row.changed_at - row.issued_at:.2f} s later"
    return f"{fate}; {reward}; {row.env} {row.example} under version {row.version}; {times}"
