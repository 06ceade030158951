"""Writes traces: every rollout of a step or an evaluation token by token, for people to look at."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from grpo.configs.reporting import TraceSettings
from grpo.orchestrator.rollouts.records import EpisodeResult, TrainingRow
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.folders import remove_leftovers
from grpo.transport.records import TrainingSample
from grpo.transport.traces import (
    FOLDER,
    SCHEMA,
    VOCABULARY_FILE,
    left_trained,
    make_table,
    merge_trained,
    token_key,
    trace_path,
    traced_steps,
    write_table,
)

log = logging.getLogger(__name__)
MAX_WAITING_BYTES = 1 << 28
"""Bytes of tokens of the traces that wait to be written, or of one trace that is larger."""
MAX_DROPPED_BYTES = 1 << 26
"""Bytes of tokens of rollouts without a batch that wait for the next trace; of more the oldest are left out."""
MAX_UNMERGED = 16
"""Steps whose part of the trainer is waited for."""
CLOSE_S = 2.0
MAX_DROPPED = 4096
"""So many of these rollouts at most."""


class Traces:
    """The traces of a run, written in order by a thread of their own. Where that is slower than the run, or the disk
    refuses, traces are missing, of which one warning is logged; nobody waits for them."""

    def __init__(self, run: Path, settings: TraceSettings, *, num_ranks: int) -> None:
        """`num_ranks`: processes of the trainer."""
        self._run, self._settings, self._num_ranks = run, settings, num_ranks
        remove_leftovers(run / FOLDER)
        self._dropped: deque[tuple[EpisodeResult, str]] = deque()
        self._num_dropped_bytes = 0
        self._writer, self._waiting = ThreadPoolExecutor(1, "traces"), deque[tuple[Future[object], int]]()
        """What waits to be written, with the bytes of its tokens."""
        self._unmerged = left_trained(run)
        """Steps whose part of the trainer is not there yet, or was left by an earlier start."""
        self._sizes: dict[int, int] | None = None
        """Bytes of the traces of steps that are there, by step, once they have been looked at."""
        self._warned = False

    def vocabulary(self, texts: Sequence[str]) -> None:
        """Writes the text of each token id, from 0. The file also tells the trainer that its part is wanted."""
        if self._settings.every is not None:
            table = pa.table({"id": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, pa.string())})
            self._later(0, write_table, table, self._run / FOLDER / VOCABULARY_FILE)

    def dropped(self, results: Iterable[EpisodeResult], reason: str) -> None:
        """Takes rollouts that no batch will have; they are in the next step's trace."""
        if self._settings.every is not None:
            for result in results:
                self._dropped.append((result, reason))
                self._num_dropped_bytes += _num_bytes([result])
            while len(self._dropped) > MAX_DROPPED or self._num_dropped_bytes > MAX_DROPPED_BYTES:
                self._warn(f"{len(self._dropped)} dropped rollouts wait for a step that is kept, and the oldest go")
                self._num_dropped_bytes -= _num_bytes([self._dropped.popleft()[0]])

    def shipped(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Writes the rollouts of batch `step`, and those that were dropped since the trace before."""
        every = self._settings.every
        if every is not None and (step == 1 or step % every == 0):
            dropped, num_bytes = list(self._dropped), self._num_dropped_bytes
            self._dropped.clear()
            self._num_dropped_bytes = 0
            num_bytes += sum(_num_bytes(group.results) for group in groups)
            self._later(num_bytes, self._write_step, step, groups, dropped)

    def evaluated(self, version: int, results: Sequence[EpisodeResult]) -> None:
        """Writes the answers to held-out examples."""
        if self._settings.every is not None:
            self._later(_num_bytes(results), self._write_evaluation, version, results)

    def trained(self, step: int) -> None:
        """Adds what the trainer knows of this step and the last ones, as soon as it has written it."""
        if self._settings.every is not None:
            self._later(0, self._merge, step)

    def close(self) -> None:
        """Returns when all is written, the trainer's part of the last step too, unless that takes long or is written on
        another machine."""
        here = (self._run / FOLDER / "trained").is_dir()
        deadline_s = time.monotonic() + (CLOSE_S if here else 0.0)
        self._later(0, self._merge, None)
        while not self._writer.submit(lambda: not self._unmerged).result() and time.monotonic() < deadline_s:
            time.sleep(0.05)
            self._later(0, self._merge, None)
        self._writer.shutdown()
        self._check()

    def _later(self, num_bytes: int, write: Callable[..., object], *arguments: object) -> None:
        """Has something written that holds so many bytes of tokens until then."""
        self._check()
        waiting = sum(num for _, num in self._waiting)
        if num_bytes and waiting and waiting + num_bytes > MAX_WAITING_BYTES:
            self._warn(f"the disk is slower than the run, {waiting + num_bytes} bytes wait")
        else:
            self._waiting.append((self._writer.submit(write, *arguments), num_bytes))

    def _check(self) -> None:
        while self._waiting and self._waiting[0][0].done():
            try:
                self._waiting.popleft()[0].result()
            except (OSError, pa.ArrowException) as error:
                self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._warned:
            log.warning("traces are missing: %s; the run goes on without them", why)
        self._warned = True

    def _merge(self, step: int | None) -> None:
        """Runs in the writer's thread, as what is below."""
        # At the end also what a trainer that was killed has trained again.
        self._unmerged = sorted({*self._unmerged, *(left_trained(self._run) if step is None else [step])})
        unmerged = [one for one in self._unmerged if not merge_trained(self._run, one, self._num_ranks)]
        for merged in set(self._unmerged) - set(unmerged) if self._sizes is not None else ():
            self._measure(merged)
        self._unmerged = unmerged[-MAX_UNMERGED:]  # older ones are written on another machine, or not at all

    def _write_step(
        self, step: int, groups: Sequence[ScoredGroup], dropped: Sequence[tuple[EpisodeResult, str]]
    ) -> None:
        rows = [row for group in groups for row in group_rows(step, group)]
        for result, reason in dropped:
            rows += [_row(step, result.id, one, number, reason=reason) for one, number in _numbered(result)]
            rows += _opponents(step, result, reason)
        write_table(make_table(rows, SCHEMA), trace_path(self._run, step))
        self._make_room(step)

    def _write_evaluation(self, version: int, results: Sequence[EpisodeResult]) -> None:
        rows = list[dict[str, Any]]()
        for root in results:
            reason = root.failure.reason if root.failure else None
            rows += [_row(version, root.id, one, number, reason=reason) for one, number in _numbered(root)]
            rows += _opponents(version, root, reason)
        write_table(make_table(rows, SCHEMA), trace_path(self._run, version, evaluation=True))

    def _make_room(self, newest: int) -> None:
        """Removes the oldest traces of steps beyond `keep_last` and `max_bytes`, but the newest. The folder is looked
        through once: in a long run it has many."""
        for step in traced_steps(self._run) if self._sizes is None else [newest]:
            self._measure(step)
        sizes, keep = self._sizes or {}, self._settings.keep_last
        num_bytes = sum(sizes.values())
        while len(sizes) > 1 and (num_bytes > self._settings.max_bytes or (keep is not None and len(sizes) > keep)):
            num_bytes -= sizes.pop(oldest := min(sizes))
            trace_path(self._run, oldest).unlink(missing_ok=True)

    def _measure(self, step: int) -> None:
        self._sizes = {} if self._sizes is None else self._sizes
        with suppress(FileNotFoundError):
            self._sizes[step] = trace_path(self._run, step).stat().st_size


def _num_bytes(results: Iterable[EpisodeResult]) -> int:
    return sum(9 * len(row.token_ids) + 64 for root in results for one in root.walk() for row in one.rows)


def group_rows(step: int, group: ScoredGroup) -> Iterator[dict[str, Any]]:
    """Yields the rows of a group in a batch, including rollouts that were withheld from training."""
    samples = iter(group.samples)
    for root in group.results:
        reason = group.withheld.get(root.id)
        for result, number in _numbered(root):
            sample = next(samples) if reason is None and number is not None else None
            yield _row(step, root.id, result, number, reason=reason, sample=sample, hints=group.hint_texts)
        yield from _opponents(step, root, reason)


def _opponents(step: int, root: EpisodeResult, reason: str | None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a game's opponents, behind those of the policy; they are not trained."""
    for result in root.walk():
        for number in range(len(result.opponent.rows) if result.opponent is not None else 0):
            assert result.opponent is not None
            row = _row(step, root.id, result.opponent, number, reason=reason)
            yield row | {"row": len(result.rows) + number}


def _numbered(root: EpisodeResult) -> Iterator[tuple[EpisodeResult, int | None]]:
    """Yields every row of a rollout and of those that it spawned, by its number; None for one without any."""
    for result in root.walk():
        if not result.rows:
            yield result, None
        for number in range(len(result.rows)):
            yield result, number


def _row(
    step: int,
    root_id: str,
    result: EpisodeResult,
    number: int | None,
    *,
    reason: str | None,
    sample: TrainingSample | None = None,
    hints: Mapping[tuple[str, int], str] | None = None,
) -> dict[str, Any]:
    """Returns one row of the trace."""
    row = None if number is None else result.rows[number]
    steps = range(len(result.steps)) if row is None else row.steps
    roles = list(dict.fromkeys(result.steps[index].role for index in steps))
    texts = [text for index in steps if (text := (hints or {}).get((result.id, index)))]
    return {
        "step": step,
        "group": int(head) if (head := root_id.partition("/")[0]).isdecimal() else result.task.index,
        "rollout": result.id,
        "row": number,
        "env": result.task.env,
        "example": result.task.index,
        "role": ", ".join(roles) or None,
        "trained": sample is not None,
        "drop_reason": reason,
        "failure": result.failure.message if result.failure else None,
        "reward": None if result.failure is not None else result.reward,
        "rewards": _json(result.rewards),
        "players": _json(result.players) if result.players else None,
        "measures": _json(result.metrics),
        "accuracy": result.accuracy,
        "num_tokens": sum(len(result.steps[index].completion.token_ids) for index in steps),
        "temperature": result.steps[steps[0]].temperature if len(steps) else None,
        "stop_reason": _stop_reason(result, steps),
        "extras": _json(result.extras) if result.extras else None,
        "hint": "\n\n".join(texts) or None,
        "fields": _json(result.fields) if result.fields else None,
        "messages": _json(_conversation(result, steps)),
        **({} if row is None else _tokens(row, sample)),
    }


_to_json = msgspec.json.Encoder(enc_hook=str).encode


def _json(value: Any) -> str:
    return _to_json(value).decode()


def _stop_reason(result: EpisodeResult, steps: Sequence[int]) -> str | None:
    if result.failure is not None:
        return result.failure.reason
    if result.context_full:
        return "context_full"
    return result.steps[steps[-1]].completion.finish_reason if len(steps) else None


def _tokens(row: TrainingRow, sample: TrainingSample | None) -> dict[str, Any]:
    """Returns the columns with a value for each token; without a sample there are no advantages."""
    versions, lengths = np.array(row.versions, np.int32).T
    tokens = {
        "token_ids": row.token_ids,
        "loss_mask": row.sampled,
        "versions": np.repeat(versions, lengths),
        "logprobs": row.logprobs,
        "key": token_key(row.token_ids),
    }
    if sample is None:
        return tokens
    advantages = np.where(row.sampled, np.asarray(sample.advantages, np.float32), np.float32(0))
    if sample.teacher_logprobs is not None:
        tokens["teacher_logprobs"] = np.where(row.sampled, sample.teacher_logprobs, np.float32(0))
    return tokens | {"advantages": advantages, "advantage": float(advantages.sum() / np.count_nonzero(row.sampled))}


def _conversation(result: EpisodeResult, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the messages of these steps: each answer after what was new to the policy, with its error."""
    messages: list[dict[str, Any]] = []
    for index in steps:
        step = result.steps[index]
        messages += [dict(message) for message in step.messages or (result.task.messages if index == 0 else ())]
        answer: dict[str, Any] = {"role": "assistant", "content": step.text}
        if step.error is not None:
            answer["error"] = step.error.message
        messages.append(answer)
    return messages or [dict(message) for message in result.task.messages]
