"""`pairs.jsonl`: every pair of a run, one line each, for a run that asks nobody."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.packing import pair_len
from orchestrator.seeds import mixed_seed
from transport.errors import CorruptError
from transport.records import PreferencePair

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
    base_model: str
    """Identity of the model whose tokenizer made the tokens and whose log-probabilities are in them."""
    tokens: Mapping[str, Any]
    """What `PreferencePair` has, but for the source."""

    @property
    def pair(self) -> PreferencePair:
        """For the trainer. Raises CorruptError for what cannot be one."""
        try:
            fields: dict[str, Any] = {name: np.array(self.tokens[name], np.int32) for name in _TOKENS}
            fields |= {name: float(self.tokens[name]) for name in _LOGPROBS}
            fields["adapter"] = int(self.tokens.get("adapter", 0))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"a pair of rollout {self.rollout_id} has no proper tokens: {error!r}") from error
        return PreferencePair(**fields, source=self.source)


def tokens_of(pair: PreferencePair) -> dict[str, Any]:
    """As a record has them."""
    ids: dict[str, Any] = {name: getattr(pair, name).tolist() for name in _TOKENS}
    return ids | {name: getattr(pair, name) for name in _LOGPROBS} | ({"adapter": pair.adapter} if pair.adapter else {})


class PairsFile:
    """Appends. The only writer; a last line that an earlier process left torn is taken away."""

    def __init__(self, path: Path) -> None:
        """`path` of the file, which is made when the first pair comes."""
        self.path = path
        self._num_lines: int | None = None
        """None: not known, and the last one may be torn."""

    def append(self, record: PairRecord) -> int:
        """One line, in one write. Returns its place, from 0. Raises OSError."""
        line = json.dumps(asdict(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if (place := self._num_lines) is None:
            _drop_torn_line(self.path)
            place = _num_lines(self.path)
        self._num_lines = None
        with self.path.open("ab", buffering=0) as file:
            if file.write(line) != len(line):
                raise OSError(f"{self.path}: the line was not written as a whole; is the disk full?")
        self._num_lines = place + 1
        return place


def _num_lines(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(partial(file.read, 1 << 20), b""))


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
    return [read() for read in each_line(path)]


def each_line(path: Path) -> Iterator[Callable[[], PairRecord]]:
    """The whole lines of a file, one after the other, each of which is taken apart, and raises CorruptError, when it is
    called. Raises OSError. Holds one line at a time: with its tokens, a run's file has hundreds of megabytes."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield partial(_record, line, f"{path}, line {number}")


def _record(line: bytes, where: str) -> PairRecord:
    try:
        record = PairRecord(**json.loads(line))
        record.pair  # noqa: B018 - raises where its tokens are no pair
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"{where} is no preference pair: {error}; remove the line") from error
    return record


# --- an offline run ---


def pairs_of_run(
    path: Path, *, base_model: str, seq_len: int | None = None, num_adapters: int = 1
) -> list[PreferencePair]:
    """All pairs that another run has kept, for a run with the same base model and so many adapters, whose trainer takes
    `seq_len` tokens for a pair. Raises ValueError where they are of another one, too long, or none; OSError; and
    CorruptError."""
    pairs = []
    for number, read in enumerate(each_line(path), 1):
        record = read()
        if record.base_model != base_model:
            raise ValueError(
                f"{path}, line {number} is a pair of a base model with identity {record.base_model}, and this run has "
                f"one with identity {base_model}; give the pairs of a run with the same base model"
            )
        pair = record.pair
        if pair.adapter >= num_adapters:
            raise ValueError(
                f"{path}, line {number} is a pair for adapter {pair.adapter}, counted from 0, and this run has "
                f"{num_adapters}; give it the adapters of the run that kept them, by model.lora_adapters"
            )
        length = pair_len(pair)
        if seq_len is not None and length > seq_len:
            raise ValueError(
                f"{path}, line {number} is a pair of {length} tokens, and seq_len is {seq_len}; raise seq_len, or "
                "remove the line"
            )
        pairs.append(pair)
    if not pairs:
        raise ValueError(f"{path} has no pairs; give the file of a run that has kept some")
    return pairs


class KeptPairs:
    """Pairs by step, so many in each: all of them in an order by lot, then all again in another one, and so on. What
    a step gets depends on the seed and the step alone, so that a run that goes on needs no state.

    Example: ``KeptPairs(pairs_of_run(path, base_model=identity), max_pairs=64, seed=42).of_step(7)``
    """

    def __init__(self, pairs: Sequence[PreferencePair], *, max_pairs: int, seed: int) -> None:
        """A step gets `max_pairs`, or all of them where they are fewer."""
        if not pairs or max_pairs < 1:
            raise ValueError(f"{len(pairs)} pairs, of which a step gets {max_pairs}, expected at least 1 each")
        self._pairs, self._seed = tuple(pairs), seed
        self._num_a_step = min(max_pairs, len(pairs))
        self._order = lru_cache(maxsize=2)(self._drawn)

    def of_step(self, step: int) -> list[PreferencePair]:
        """From step 1 on. A pair can come twice in the step in which one order ends and the next begins."""
        first = (step - 1) * self._num_a_step
        places = (divmod(place, len(self._pairs)) for place in range(first, first + self._num_a_step))
        return [self._pairs[self._order(epoch)[place]] for epoch, place in places]

    def _drawn(self, epoch: int) -> list[int]:
        order = list(range(len(self._pairs)))
        random.Random(mixed_seed(self._seed, "kept-pairs", epoch)).shuffle(order)
        return order
