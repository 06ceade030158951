"""`grpo ledger RUN`: what became of a prompt, a group, a rollout, and what trained a step. The reading side of
`ledger.sqlite`, whose one writer is the orchestrator."""

import argparse
import json
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LEDGER_FILE = "ledger.sqlite"
_FIELDS = (
    *("id", "group_id", "env", "example", "version", "state", "reason", "step", "reward", "num_tokens"),
    *("issued_at", "changed_at"),
)
_BUSY_S = 5.0
_PROGRESS_STEPS = 10_000
_EPILOG = """\
states: issued, scored (has its reward), shipping (about to leave for the trainer), shipped, trained, dropped (with a
reason). exit codes: 0 done; 1 --check has found a violation, or what was asked for is not in the ledger; 2 there is no
ledger, or the command line is wrong; 141 nobody reads what it prints, as in grpo ledger RUN | head"""


class LedgerError(ValueError):
    """A ledger that is not there or cannot be read, or a question that it cannot answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """The fate of one rollout. Example: ``RolloutRow(id="17/3", group_id=17, state="trained", step=2, ...)``"""

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


@contextmanager
def open_ledger(folder: Path, *, limit_s: float | None = None) -> Iterator[sqlite3.Connection]:
    """The ledger of the run in `folder`, to be read only, whether or not it is being written. `limit_s`: queries that
    take longer altogether raise sqlite3.OperationalError. Raises `LedgerError` where there is none."""
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise LedgerError(f"{path}: no such file; give the output_dir of a run whose orchestrator has started")
    # Without a writer there is no write-ahead log, and then nothing need be created for reading.
    mode = "mode=ro" if path.with_name(f"{LEDGER_FILE}-wal").exists() else "mode=ro&immutable=1"
    database = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=_BUSY_S)
    if limit_s is not None:
        deadline_s = time.monotonic() + limit_s
        database.set_progress_handler(lambda: time.monotonic() > deadline_s, _PROGRESS_STEPS)
    try:
        if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollouts'").fetchone() is None:
            raise LedgerError(f"{path} has no rollouts yet; the orchestrator has only begun")
        yield database
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise LedgerError(f"{path} is not a ledger: {error}") from error
    finally:
        database.close()


# --- the command ---


def main(argv: Sequence[str]) -> int:
    """`grpo ledger`; the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.env is None) != (options.example is None):
        parser.error("--env and --example belong together: --env reverse-text --example 12")
    try:
        with open_ledger(options.run) as database:
            answer = _answer(options, database)
    except LedgerError as error:
        parser.error(str(error))
    except sqlite3.OperationalError as error:
        parser.error(f"{options.run / LEDGER_FILE} cannot be read now: {error}; try again")
    print(json.dumps(answer.fields, indent=1) if options.json else answer.text)
    return answer.exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is printed, in both forms."""

    text: str
    fields: Mapping[str, Any]
    exit_code: int = 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo ledger",
        description="What became of the rollouts of a run: totals, or the answer to one question.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder (output_dir)")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--group", metavar="N", type=int, help="one group: the rollouts of one prompt")
    question.add_argument("--rollout", metavar="N/M", help="one rollout")
    question.add_argument("--step", metavar="N", type=int, help="what trained step N")
    question.add_argument("--env", metavar="NAME", help="with --example: every group of one prompt")
    question.add_argument("--prompt", metavar="TEXT", help="every group of the prompts that contain TEXT")
    question.add_argument("--check", action="store_true", help="whether the ledger agrees with itself and the metrics")
    parser.add_argument("--example", metavar="I", type=int, help="with --env: number of the example, from 0")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _answer(options: argparse.Namespace, database: sqlite3.Connection) -> Answer:
    if options.check:
        from deploy.ledger_check import check

        return checked(check(options.run, database))
    if options.group is not None:
        return of_rollouts(rollouts(database, "group_id = ?", options.group), f"group {options.group}")
    if options.rollout is not None:
        return of_rollouts(rollouts(database, "id = ?", options.rollout), f"rollout {options.rollout}")
    if options.step is not None:
        return of_step(rollouts(database, "step = ?", options.step), options.step)
    if options.env is not None:
        return of_prompts(database, [(options.env, options.example, None)])
    if options.prompt is not None:
        return of_prompts(database, find_prompts(options.run, options.prompt))
    return totals(database)


# --- questions ---


def rollouts(database: sqlite3.Connection, where: str, *values: object) -> list[RolloutRow]:
    """The rollouts for which `where` holds, by group and number."""
    rows = database.execute(f"SELECT {', '.join(_FIELDS)} FROM rollouts WHERE {where}", values)
    found = [RolloutRow(**dict(zip(_FIELDS, row, strict=True))) for row in rows]
    return sorted(found, key=lambda row: (row.group_id, int(row.id.partition("/")[2])))


def totals(database: sqlite3.Connection) -> Answer:
    """How many rollouts are in which state, and why they were dropped."""
    counts = database.execute("SELECT state, reason, COUNT(*) FROM rollouts GROUP BY state, reason").fetchall()
    states = Counter[str]()
    for state, _, num in counts:
        states[state] += num
    dropped = {str(reason): num for state, reason, num in counts if state == "dropped"}
    groups, first, last = database.execute(
        "SELECT COUNT(DISTINCT group_id), MIN(issued_at), MAX(changed_at) FROM rollouts"
    ).fetchone()
    step = database.execute("SELECT MAX(step) FROM rollouts").fetchone()[0]
    lines = [f"{states.total():,} rollouts in {groups:,} groups, up to step {step or 0}"]
    lines += [f"  {state:10} {num:>12,}" for state, num in sorted(states.items())]
    lines += [f"    {reason:20} {num:,}" for reason, num in sorted(dropped.items(), key=lambda item: -item[1])]
    lines += [f"first issued {_when(first)}, last change {_when(last)}"] if first is not None else []
    fields = {"rollouts": states.total(), "groups": groups, "step": step, "states": dict(states), "dropped": dropped}
    return Answer(text="\n".join(lines), fields=fields | {"first_issued_at": first, "last_changed_at": last})


def of_rollouts(rows: Sequence[RolloutRow], what: str) -> Answer:
    """Each rollout, in a line."""
    if not rows:
        return Answer(text=f"{what} is not in the ledger", fields={"rollouts": []}, exit_code=1)
    return Answer(text="\n".join([what, *_table(rows)]), fields={"rollouts": _json(rows)})


def of_step(rows: Sequence[RolloutRow], step: int) -> Answer:
    """The rollouts that a step trains on, with their totals."""
    if not rows:
        return Answer(text=f"step {step} is not in the ledger", fields={"step": step, "rollouts": []}, exit_code=1)
    states, lags = Counter(row.state for row in rows), Counter(row.lag for row in rows)
    environments = Counter(row.env for row in rows)
    reward = statistics.fmean(row.reward for row in rows if row.reward is not None)
    tokens = sum(row.num_tokens or 0 for row in rows)
    groups = len({row.group_id for row in rows})
    heading = (
        f"step {step}: {len(rows)} rollouts of {groups} groups, {_counts(states)}; mean reward {reward:.4g}; "
        f"{tokens:,} sampled tokens; lag {_counts(lags)}; {_counts(environments)}"
    )
    totals = {"groups": groups, "states": dict(states), "mean_reward": reward, "sampled_tokens": tokens}
    fields = {"step": step, **totals, "lags": {str(lag): num for lag, num in lags.items()}, "rollouts": _json(rows)}
    return Answer(text="\n".join([heading, *_table(rows)]), fields=fields)


def of_prompts(database: sqlite3.Connection, prompts: Sequence[tuple[str, int, str | None]]) -> Answer:
    """Every group of each of the prompts: environment, example, and text where it is known."""
    lines, fields = [], []
    for env, example, prompt in prompts:
        rows = rollouts(database, "env = ? AND example = ?", env, example)
        groups = len({row.group_id for row in rows})
        shown = "" if prompt is None else f": {prompt}"
        asked = f"asked {groups} times" if groups != 1 else "asked once"
        lines += [f"example {example} of {env}, {asked if rows else 'never asked'}{shown}", *_table(rows)]
        fields.append({"env": env, "example": example, "prompt": prompt, "rollouts": _json(rows)})
    found = any(one["rollouts"] for one in fields)
    return Answer(text="\n".join(lines), fields={"prompts": fields}, exit_code=int(not found))


def find_prompts(folder: Path, text: str) -> list[tuple[str, int, str | None]]:
    """Environment, number and prompt of the training examples whose prompt contains `text`. Constructs the run's
    environments from the settings in `run.json`, and reads their training split. Raises `LedgerError`."""
    from orchestrator.envs.registry import make_environment

    try:
        environments = json.loads((folder / "run.json").read_bytes())["programs"]["orch"]["settings"]["env"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{folder}/run.json does not tell the environments: {error!r}; give --env and --example"
        raise LedgerError(message) from None
    found: list[tuple[str, int, str | None]] = []
    for env in environments:
        try:
            examples = make_environment(env["id"], env["args"]).dataset("train")
        except Exception as error:
            message = f"environment {env['id']} cannot be constructed here: {error}; give --env and --example"
            raise LedgerError(message) from error
        prompts = (_prompt_text(examples[index]["prompt"]) for index in range(len(examples)))
        found += [(env["name"] or env["id"], index, prompt) for index, prompt in enumerate(prompts) if text in prompt]
    if not found:
        raise LedgerError(f"no training prompt contains {text!r}")
    return found


def _prompt_text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


# --- as text ---


def checked(checks: Sequence[Any]) -> Answer:
    """What `--check` has found."""
    violated = [one for one in checks if one.violations]
    lines = []
    for one in checks:
        lines.append(f"{'VIOLATED' if one.violations else 'ok      '}  {one.name}")
        lines += [f"          {violation}" for violation in one.violations]
    lines.append(f"{len(violated)} of {len(checks)} checks violated" if violated else f"all {len(checks)} checks hold")
    fields = {"checks": [asdict(one) for one in checks], "violated": len(violated)}
    return Answer(text="\n".join(lines), fields=fields, exit_code=int(bool(violated)))


def _table(rows: Sequence[RolloutRow]) -> list[str]:
    if not rows:
        return []
    width = max(len(row.id) for row in rows)
    return [f"  {row.id:{width}}  {_line(row)}" for row in rows]


def _line(row: RolloutRow) -> str:
    fate = row.state if row.reason is None else f"{row.state}: {row.reason}"
    fate += "" if row.step is None else f" in step {row.step}, lag {row.lag}"
    reward = "no reward" if row.reward is None else f"reward {row.reward:.4g}, {row.num_tokens} tokens"
    times = f"issued {_when(row.issued_at)}, {row.state} {row.changed_at - row.issued_at:.2f} s later"
    return f"{fate}; {reward}; {row.env} {row.example} under version {row.version}; {times}"


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{num} {key}" if isinstance(key, str) else f"{key}: {num}" for key, num in sorted(counts.items()))


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _json(rows: Sequence[RolloutRow]) -> list[dict[str, Any]]:
    return [asdict(row) | {"lag": row.lag} for row in rows]
