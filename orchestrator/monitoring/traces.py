"""Writes traces: every rollout of a step or an evaluation token by token, for people to look at."""

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from configs.reporting import TraceSettings
from orchestrator.rollouts.records import EpisodeResult, TrainingRow
from orchestrator.samples import FinishedGroup
from transport.records import TrainingSample
from transport.traces import FOLDER, SCHEMA, VOCABULARY_FILE, merge_trained, token_key, trace_path, write_table

log = logging.getLogger(__name__)
MAX_DROPPED = 4096
"""Rollouts without a batch that wait for the next trace; of more the oldest are left out."""


class Traces:
    """The traces of a run. Its methods block, and are called one at a time in a thread; where the disk refuses, the
    run goes on and says so once."""

    def __init__(self, run: Path, settings: TraceSettings) -> None:
        self._run, self._settings = run, settings
        self._dropped: deque[tuple[EpisodeResult, str]] = deque(maxlen=MAX_DROPPED)
        self._warned = False

    def is_due(self, step: int) -> bool:
        """Whether the rollouts of this step are kept."""
        every = self._settings.every
        return every is not None and (step == 1 or step % every == 0)

    def dropped(self, results: Iterable[EpisodeResult], reason: str) -> None:
        """Rollouts that no batch will have; they are in the next step's trace. Does not block."""
        if self._settings.every is not None:
            self._dropped.extend((result, reason) for result in results)

    def write_vocabulary(self, texts: Sequence[str]) -> None:
        """The text of each token id, from 0."""
        if self._settings.every is not None:
            table = pa.table({"id": pa.array(range(len(texts)), pa.int32()), "text": pa.array(texts, pa.string())})
            self._write(table, self._run / FOLDER / VOCABULARY_FILE)

    def write_step(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """The rollouts of batch `step`, and those that were dropped since the batch before."""
        if not self.is_due(step):
            return
        rows = [row for group in groups for row in group_rows(step, group)]
        while self._dropped:
            result, reason = self._dropped.popleft()
            rows += [_row(step, result.id, one, number, reason=reason) for one, number in _numbered(result)]
        self._write(pa.Table.from_pylist(rows, schema=SCHEMA), trace_path(self._run, step))
        self._make_room()

    def write_evaluation(self, version: int, results: Iterable[EpisodeResult]) -> None:
        """The answers to held-out examples."""
        if self._settings.every is None:
            return
        rows = [
            _row(version, root.id, one, number, reason=root.failure.reason if root.failure else None)
            for root in results
            for one, number in _numbered(root)
        ]
        self._write(pa.Table.from_pylist(rows, schema=SCHEMA), trace_path(self._run, version, evaluation=True))

    def complete(self, step: int, num_ranks: int) -> None:
        """Adds what the trainer knows of a step that it has made; its part may be missing, as on another machine."""
        try:
            merge_trained(self._run, step, num_ranks)
        except (OSError, pa.ArrowException) as error:
            self._warn(error)

    def _write(self, table: pa.Table, path: Path) -> None:
        try:
            write_table(table, path)
        except (OSError, pa.ArrowException) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning("traces cannot be written: %s; the run goes on without", error)
        self._warned = True

    def _make_room(self) -> None:
        """Removes the oldest traces of steps beyond `keep_last` and `max_bytes`."""
        try:
            paths = sorted((self._run / FOLDER).glob("step_*.parquet"), reverse=True)
            num_bytes = 0
            for place, path in enumerate(paths):
                num_bytes += path.stat().st_size
                keep = self._settings.keep_last
                if place and (num_bytes > self._settings.max_bytes or (keep is not None and place >= keep)):
                    path.unlink(missing_ok=True)
        except OSError as error:
            self._warn(error)


def group_rows(step: int, group: FinishedGroup) -> Iterator[dict[str, Any]]:
    """The rows of a group that has gone into a batch, those included that were withheld from it."""
    samples = iter(group.samples)
    hints = {(given.rollout_id, given.step): given.text for given in group.hints}
    for root in group.results:
        reason = group.withheld.get(root.id)
        for result, number in _numbered(root):
            sample = next(samples) if reason is None and number is not None else None
            yield _row(step, root.id, result, number, reason=reason, sample=sample, hints=hints)


def _numbered(root: EpisodeResult) -> Iterator[tuple[EpisodeResult, int | None]]:
    """Every row of a rollout and of those it spawned, by its number; None for one without any."""
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
    """One row of the trace."""
    row = None if number is None else result.rows[number]
    steps = range(len(result.steps)) if row is None else row.steps
    roles = list(dict.fromkeys(result.steps[index].role for index in steps))
    texts = [text for index in steps if (text := (hints or {}).get((result.id, index)))]
    return {
        "step": step,
        "group": int(root_id.partition("/")[0]) if root_id.partition("/")[0].isdecimal() else None,
        "rollout": result.id,
        "row": number,
        "env": result.task.env,
        "example": result.task.index,
        "role": ", ".join(roles) or None,
        "trained": sample is not None,
        "drop_reason": reason,
        "reward": None if result.failure is not None else result.reward,
        "rewards": list(result.rewards.items()),
        "measures": list(result.metrics.items()),
        "accuracy": result.accuracy,
        "num_tokens": sum(len(result.steps[index].completion.token_ids) for index in steps),
        "temperature": result.steps[steps[0]].temperature if len(steps) else None,
        "stop_reason": _stop_reason(result, steps),
        "hint": "\n\n".join(texts) or None,
        "messages": json.dumps(_conversation(result, steps), ensure_ascii=False, default=str),
        **({} if row is None else _tokens(row, sample)),
    }


def _stop_reason(result: EpisodeResult, steps: Sequence[int]) -> str | None:
    if result.failure is not None:
        return result.failure.reason
    if result.context_full:
        return "context_full"
    return result.steps[steps[-1]].completion.finish_reason if len(steps) else None


def _tokens(row: TrainingRow, sample: TrainingSample | None) -> dict[str, Any]:
    """What there is for each token; without a sample no advantage is known."""
    versions, lengths = zip(*row.versions, strict=True)
    tokens = {
        "token_ids": row.token_ids,
        "loss_mask": row.sampled,
        "versions": np.repeat(np.asarray(versions, np.int32), lengths),
        "logprobs": row.logprobs,
        "key": token_key(row.token_ids),
    }
    if sample is None:
        return tokens
    advantages = np.where(row.sampled, np.asarray(sample.advantages, np.float32), np.float32(0))
    return tokens | {"advantages": advantages, "advantage": float(advantages[row.sampled].mean())}


def _conversation(result: EpisodeResult, steps: Sequence[int]) -> list[dict[str, Any]]:
    """The messages of these steps, each answer after what was new to the policy; errors and what a tool said are in
    them."""
    told: list[dict[str, Any]] = []
    for index in steps:
        step = result.steps[index]
        told += [dict(message) for message in step.messages or (result.task.messages if index == 0 else ())]
        answer: dict[str, Any] = {"role": "assistant", "content": step.text}
        if step.error is not None:
            answer["error"] = step.error.message
        told.append(answer)
    return told or [dict(message) for message in result.task.messages]
