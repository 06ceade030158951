"""Pairs that wait for a batch, in this process and after it."""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.disagreement.records import PairRecord, each_line
from orchestrator.packing import pair_len
from transport.errors import CorruptError
from transport.records import PreferencePair

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A pair, and what decides when it is trained. Each is another one, whatever it holds."""

    pair: PreferencePair
    version: int
    """The oldest that sampled any of what was rejected."""
    line: int | None = None
    """Its place in `pairs.jsonl`, from 0; None where it is not there."""


class ReadyPairs:
    """A batch takes the newest ones; the others wait until they are too old. Without clock or I/O."""

    def __init__(
        self,
        waiting: Sequence[Ready] = (),
        *,
        max_ready: int,
        max_off_policy_steps: int | None,
        num_lines: int = 0,
        step: int = 0,
    ) -> None:
        """`waiting` from an earlier process. At most `max_ready` wait. With batch `step` go pairs whose lag,
        step − 1 − version, is at most `max_off_policy_steps`; None: any. `num_lines` are in `pairs.jsonl`
        already; `step`: the newest batch that has left."""
        self._waiting, self._max_ready, self._max_lag = list(waiting), max_ready, max_off_policy_steps
        self._num_lines = num_lines
        self._step = step
        self.num: Counter[str] = Counter()
        """Pairs that no batch takes: `not_taken` for lack of room, `too_old`."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: Ready) -> None:
        """One more; where there is no room, the oldest goes."""
        if one.line is not None:
            self._num_lines = max(self._num_lines, one.line + 1)
        self._waiting.append(one)
        if len(self._waiting) > self._max_ready:
            self._waiting.remove(min(self._waiting, key=lambda other: other.version))
            self.num["not_taken"] += 1

    def take(self, most: int, step: int) -> list[PreferencePair]:
        """Up to `most` pairs for batch `step`, those of the newest versions; each is given once."""
        self._step = step
        fresh = [one for one in self._waiting if not self._is_old(one.version, step)]
        self.num["too_old"] += len(self._waiting) - len(fresh)
        fresh.sort(key=lambda one: one.version)
        num_left = max(0, len(fresh) - most)
        self._waiting = fresh[:num_left]
        return [one.pair for one in fresh[num_left:]]

    def comes_too_late(self, version: int) -> bool:
        """Whether what `version` sampled would be too old for the next batch already."""
        return self._is_old(version, self._step + 1)

    def _is_old(self, version: int, step: int) -> bool:
        return self._max_lag is not None and step - 1 - version > self._max_lag

    def state(self) -> dict[str, Any]:
        """JSON, for `waiting_again`: lines that were there, and those of them that still wait."""
        lines = [one.line for one in self._waiting if one.line is not None]
        return {"num_lines": self._num_lines, "waiting": sorted(lines)}


def waiting_again(
    path: Path,
    state: Mapping[str, Any] | None,
    *,
    has_left: Callable[[str], bool],
    base_model: str,
    sequence_len: int,
) -> tuple[list[Ready], int]:
    """The pairs that no batch has taken, for a run that goes on after a batch, and how many lines `pairs.jsonl` has.
    `state` was kept with that batch; None: with none was any kept. Of what was written since, pairs count whose group
    `has_left` with a batch by then, by a rollout's id; the prompts of others are asked again, and give pairs of their
    own, unless their whole group was dropped. What cannot be read is left out, with a warning."""
    kept, num_before = (set(), sys.maxsize) if state is None else (set(state["waiting"]), state["num_lines"])
    waiting: list[Ready] = []
    num_lines = num_again = 0
    try:
        for line, read in enumerate(each_line(path)):
            num_lines += 1
            if line < num_before and line not in kept:
                continue
            kept.discard(line)
            if (found := _read(read)) is None:
                continue
            record, pair, version = found
            if line >= num_before and not has_left(record.rollout_id):
                num_again += 1
            elif record.base_model == base_model and pair_len(pair) <= sequence_len:
                waiting.append(Ready(pair=pair, version=version, line=line))
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        log.warning("pairs that no batch has taken are left out: %s", error)
        return [], 0
    if kept:
        log.warning("%d pairs that no batch has taken are left out: %s has %d lines", len(kept), path, num_lines)
    if num_again:
        told = "%d pairs of %s are not trained: their prompts are asked again, unless all of their group was dropped"
        log.info(told, num_again, path)
    return waiting, num_lines


def _read(read: Callable[[], PairRecord]) -> tuple[PairRecord, PreferencePair, int] | None:
    """A line's record, its pair and the oldest version that sampled it; None, with a warning, where it has none."""
    try:
        record = read()
        return record, record.pair, min(run[0] for run in record.versions)
    except (CorruptError, IndexError, TypeError, ValueError) as error:
        log.warning("a pair that no batch has taken is left out: %s", error)
        return None
