"""`grpo ledger RUN`: what became of a prompt, a group, a rollout, and what trained a step. Reads `ledger.sqlite`, whose
only writer is the orchestrator."""

import argparse
import json
import math
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from grpo.run_files import orch_settings, read_run
from grpo.transport.errors import UserError
from grpo.transport.logs import printable

LEDGER_FILE = "ledger.sqlite"
_BUSY_S = 5.0
_PROGRESS_STEPS = 10_000
_LARGEST = 2**63 - 1
EPILOG = """\
states: issued, scored (has its reward), shipping (about to leave for the trainer), shipped, trained, dropped (with a
reason). exit codes: 0 done; 1 --check has found a violation, or what was asked for is not in the ledger; 2 there is no
ledger, or the command line is wrong"""


class TrainingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of one rollout. Example: ``TrainingRow(id="17/3", group_id=17, state="trained", step=2, ...)``"""

    id: str
    """`group/number`."""
    group_id: int
    env: str
    example: int
    """Number of the example in the environment's `train` split."""
    version: int
    """Policy version that it was started under."""
    state: str
    reason: str | None
    """Of a dropped one."""
    step: int | None
    """The batch that it is part of."""
    reward: float | None
    num_tokens: int | None
    """Sampled tokens."""
    issued_at: float
    """Wall clock, seconds since 1970."""
    changed_at: float
    """When it came into this state; wall clock, seconds since 1970."""

    @property
    def lag(self) -> int | None:
        """Versions that the policy had moved on by, where it is part of a batch."""
        return None if self.step is None else self.step - 1 - self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is printed, in both forms."""

    text: str
    fields: Mapping[str, Any]
    exit_code: int = 0


@contextmanager
def open_ledger(folder: Path, *, limit_s: float = math.inf) -> Iterator[sqlite3.Connection]:
    """The ledger of the run in `folder`, to be read only, whether or not it is being written. Queries that take longer
    than `limit_s` altogether raise sqlite3.OperationalError. Raises `UserError` where there is none."""
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the output_dir of a run whose orchestrator has started")
    # Without a writer there is no write-ahead log, and then nothing need be created for reading.
    mode = "mode=ro" if path.with_name(f"{LEDGER_FILE}-wal").exists() else "mode=ro&immutable=1"
    database = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_BUSY_S)
    deadline_s = time.monotonic() + limit_s
    database.set_progress_handler(lambda: time.monotonic() > deadline_s, _PROGRESS_STEPS)
    try:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollouts'").fetchone() is None:
            raise UserError(f"{path} has no rollouts yet; the orchestrator has only begun")
        yield database
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "no such column" not in str(error):
            raise
        raise UserError(f"{path} is not a ledger of this release: {error}") from error
    finally:
        database.close()


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `grpo ledger`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--group", metavar="N", type=_number, help="one group: the rollouts of one prompt")
    question.add_argument("--rollout", metavar="N/M", type=_rollout, help="one rollout")
    question.add_argument("--step", metavar="N", type=_number, help="what trained step N")
    question.add_argument("--example", metavar="ENV/I", type=_example, help="every group of example I, from 0")
    question.add_argument("--prompt", metavar="TEXT", help="the same for each training prompt that contains TEXT")
    question.add_argument("--check", action="store_true", help="whether the ledger agrees with itself and the metrics")
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
    """`grpo ledger`; the exit code."""
    try:
        with open_ledger(options.run) as database:
            answer = _answer(options, database)
    except sqlite3.OperationalError as error:
        raise UserError(f"{options.run / LEDGER_FILE} cannot be read now: {error}; try again") from error
    print(json.dumps(answer.fields, indent=1) if options.json else printable(answer.text))
    return answer.exit_code


def _answer(options: argparse.Namespace, database: sqlite3.Connection) -> Answer:
    if options.check:
        from grpo.commands.ledger_check import check

        return checked(check(options.run, database))
    if options.group is not None:
        return of_rollouts(rollouts(database, "group_id = ?", options.group), f"group {options.group}")
    if options.rollout is not None:
        which = "group_id = ? AND number = ?"
        return of_rollouts(rollouts(database, which, *options.rollout), "rollout {}/{}".format(*options.rollout))
    if options.step is not None:
        return of_rollouts(rollouts(database, "step = ?", options.step), f"step {options.step}")
    if options.example is not None:
        return of_example(database, *options.example)
    if options.prompt is not None:
        return of_prompts(database, find_prompts(options.run, options.prompt))
    return totals(database)


# --- questions ---


def rollouts(database: sqlite3.Connection, where: str, *values: object) -> list[TrainingRow]:
    """The rollouts for which `where` holds, by group and number. Raises `UserError` for a row that is none."""
    names = TrainingRow.__struct_fields__
    rows = database.execute(f"SELECT {', '.join(names)} FROM rollouts WHERE {where}", values).fetchall()
    try:
        found = [msgspec.convert(dict(zip(names, row, strict=True)), TrainingRow) for row in rows]
    except msgspec.ValidationError as error:
        raise UserError(f"{LEDGER_FILE} is damaged: a row of its rollouts is none: {error}") from None
    return sorted(found, key=lambda row: (row.group_id, len(row.id), row.id))


def totals(database: sqlite3.Connection) -> Answer:
    """How many rollouts are in which state, and why they were dropped. Those that are trained, most of them, are not
    grouped: to sort a million rows takes a second."""
    others = "SELECT state, reason, COUNT(*) FROM rollouts WHERE state != 'trained' GROUP BY 1, 2"
    states, dropped = Counter[str](), Counter[str]()
    for state, reason, count in database.execute(others):
        states[str(state)] += count
        dropped += Counter({str(reason): count} if state == "dropped" else {})
    num, groups = database.execute("SELECT COUNT(*), COUNT(DISTINCT group_id) FROM rollouts").fetchone()
    step = database.execute("SELECT MAX(step) FROM rollouts WHERE step IS NOT NULL").fetchone()[0]
    states += Counter(trained=num - states.total())
    lines = [f"{num:,} rollouts in {groups:,} groups, up to step {step or 0}"]
    lines += [f"  {state:10} {count:>12,}" for state, count in sorted(states.items())]
    lines += [f"    {reason:20} {count:,}" for reason, count in dropped.most_common()]
    return Answer(
        text="\n".join(lines),
        fields={"rollouts": num, "groups": groups, "step": step, "states": states, "dropped": dropped},
    )


def of_rollouts(rows: Sequence[TrainingRow], what: str) -> Answer:
    """Each rollout in a line, below what they come to together."""
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
    listed = [msgspec.structs.asdict(row) | {"lag": row.lag} for row in rows]
    return Answer(text="\n".join(lines), fields=together | {"rollouts": listed})


def of_example(database: sqlite3.Connection, env: str, example: int, prompt: str | None = None) -> Answer:
    """Every group that asked it. `prompt`: its text, where it is known."""
    what = f"example {example} of {env}" + ("" if prompt is None else f" ({prompt})")
    answer = of_rollouts(rollouts(database, "env = ? AND example = ?", env, example), what)
    return replace(answer, fields={"env": env, "example": example, "prompt": prompt, **answer.fields})


def of_prompts(database: sqlite3.Connection, prompts: Sequence[tuple[str, int, str]]) -> Answer:
    """Of each prompt what became of it; they are environment, example and text."""
    answers = [of_example(database, *prompt) for prompt in prompts]
    text, fields = "\n".join(one.text for one in answers), {"prompts": [one.fields for one in answers]}
    return Answer(text=text, fields=fields, exit_code=min(one.exit_code for one in answers))


def find_prompts(folder: Path, text: str) -> list[tuple[str, int, str]]:
    """Environment, number and prompt of the training examples whose prompt contains `text`. Constructs the run's
    environments from the settings in `run.json`, and reads their training split. Raises `UserError`."""
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
            said = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
            if text in said:
                found.append((env.get("name") or env["id"], index, said))
    if not found:
        raise UserError(f"no training prompt contains {text!r}")
    return found


# --- as text ---


def checked(violations: Mapping[str, Sequence[str]]) -> Answer:
    """What `--check` has found, by check."""
    lines, violated = [], sum(bool(found) for found in violations.values())
    for name, found in violations.items():
        lines += [f"{'VIOLATED' if found else 'ok      '}  {name}", *(f"          {one}" for one in found)]
    fields = {"checks": violations, "violated": violated}
    lines.append(f"{violated} of {len(violations)} checks violated" if violated else f"all {len(lines)} checks hold")
    return Answer(text="\n".join(lines), fields=fields, exit_code=int(violated > 0))


def _line(row: TrainingRow) -> str:
    fate = row.state if row.reason is None else f"{row.state}: {row.reason}"
    fate += "" if row.step is None else f" in step {row.step}, lag {row.lag}"
    reward = "no reward" if row.reward is None else f"reward {row.reward:.4g}, {row.num_tokens} tokens"
    issued = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.issued_at))
    times = f"issued {issued}, {row.state} {row.changed_at - row.issued_at:.2f} s later"
    return f"{fate}; {reward}; {row.env} {row.example} under version {row.version}; {times}"
