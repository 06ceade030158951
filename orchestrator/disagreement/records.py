"""`pairs.jsonl`: every pair of a run, one line each, for a run that asks nobody."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transport.errors import CorruptError
from transport.types import PreferencePair

PAIRS_FILE = "pairs.jsonl"
_TOKENS = ("prompt_ids", "chosen_ids", "rejected_ids")
_LOGPROBS = ("chosen_ref_logprob", "rejected_ref_logprob")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """A pair with where it comes from. Texts serve any model; tokens serve the model that they were made for."""

    messages: Sequence[Mapping[str, Any]]
    """The state."""
    chosen: str
    rejected: str
    source: str
    cost: float
    """Of the questions about this turn."""
    versions: Sequence[Sequence[int]]
    """Runs of (policy version, number of tokens) that sampled what was rejected."""
    rollout_id: str
    step: int
    """The turn's place among the rollout's steps."""
    env: str
    tools: Sequence[Mapping[str, Any]] | None
    tokens: Mapping[str, Any]
    """What `PreferencePair` has, but for the source."""

    @property
    def pair(self) -> PreferencePair:
        """For the trainer. Raises CorruptError for what cannot be one."""
        try:
            fields: dict[str, Any] = {name: np.array(self.tokens[name], np.int32) for name in _TOKENS}
            fields |= {name: float(self.tokens[name]) for name in _LOGPROBS}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"a pair of rollout {self.rollout_id} has no proper tokens: {error!r}") from error
        return PreferencePair(**fields, source=self.source)


def tokens_of(pair: PreferencePair) -> dict[str, Any]:
    """As a record has them."""
    ids: dict[str, Any] = {name: getattr(pair, name).tolist() for name in _TOKENS}
    return ids | {name: getattr(pair, name) for name in _LOGPROBS}


class PairsFile:
    """Appends. The only writer; a last line that an earlier process left torn is taken away."""

    def __init__(self, path: Path) -> None:
        """`path` of the file, which is made when the first pair comes."""
        self.path = path
        self._mended = False

    def append(self, record: PairRecord) -> None:
        """One line, in one write. Raises OSError."""
        line = json.dumps(asdict(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if not self._mended:
            _drop_torn_line(self.path)
            self._mended = True
        with self.path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                self._mended = False
                raise OSError(f"{self.path}: the line was not written as a whole; is the disk full?")


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = kept = file.seek(0, 2)
        while kept:
            start = max(0, kept - 65536)
            file.seek(start)
            if (newline := file.read(kept - start).rfind(b"\n")) >= 0:
                kept = start + newline + 1
                break
            kept = start
        if kept < size:
            file.truncate(kept)


def read_pairs(path: Path) -> list[PairRecord]:
    """All pairs of a file; a last line that was cut short is left out. Raises CorruptError for any other line that is
    no pair."""
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _record(line: bytes, where: str) -> PairRecord:
    try:
        record = PairRecord(**json.loads(line))
        record.pair  # noqa: B018 - raises where its tokens are no pair
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{where} is no preference pair: {error}; remove the line") from error
    return record
