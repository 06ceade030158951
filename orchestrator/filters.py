"""Rollouts that have gone astray, found by their tokens and log-probabilities alone.

Legend: `L` sampled tokens of one answer, `V` vocabulary.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from configs.rollouts import FilterSettings
from transport.importing import NotFound, find


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(ABC):
    """Looks at one answer."""

    name: ClassVar[str]
    """As in the settings and metrics."""
    enforce: bool = False
    """Keep what is found out of the loss."""

    @abstractmethod
    def finds(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> bool:
        """Whether it shows in an answer with these natural log-probabilities, as sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gibberish(Filter):
    """A token with an id above `token_id_threshold` and a log-probability below -log(V) - `logprob_offset`.

    Byte-pair vocabularies number tokens by how often they were seen, so high ids are rare. A uniform draw from the
    vocabulary has the log-probability -log(V): what is that unlikely was drawn from the tail.
    Example: ``Gibberish(token_id_threshold=100_000, logprob_offset=2.0, vocab_size=151_936)``: below -13.93.
    """

    name: ClassVar[str] = "gibberish"
    token_id_threshold: int
    logprob_offset: float
    """Nats."""
    vocab_size: int

    def __post_init__(self) -> None:
        if self.token_id_threshold >= self.vocab_size - 1:
            raise ValueError(
                f"filters: token_id_threshold = {self.token_id_threshold} finds nothing: the model's token ids end at "
                f"{self.vocab_size - 1}; lower it, or remove the filter of type gibberish"
            )

    def finds(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> bool:
        rare = np.asarray(token_ids_L, np.int64) > self.token_id_threshold
        unlikely = np.asarray(logprobs_L, np.float64) < -math.log(self.vocab_size) - self.logprob_offset
        return bool(np.any(rare & unlikely))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition(Filter):
    """`window` tokens in a row, each with a probability above `prob_threshold`: the policy only copies what is there.

    Example: ``Repetition(window=3000, prob_threshold=0.99)``
    """

    name: ClassVar[str] = "repetition"
    window: int
    prob_threshold: float

    def finds(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> bool:
        certain = np.asarray(logprobs_L, np.float64) > math.log(self.prob_threshold)
        places = np.arange(1, len(certain) + 1)
        last_uncertain = np.maximum.accumulate(np.where(certain, 0, places))
        return bool(np.any(places - last_uncertain >= self.window))


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom(Filter):
    """What a user's function says."""

    name: ClassVar[str] = "custom"
    import_path: str
    function: Callable[[list[int], list[float]], object]

    def finds(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> bool:
        """As the function says. Raises ValueError where it says neither True nor False."""
        said = self.function(list(token_ids_L), list(logprobs_L))
        if not isinstance(said, bool | np.bool_):
            raise ValueError(f"filters.import_path = {self.import_path!r} returned {said!r:.100}, expected a bool")
        return bool(said)


def make_filters(filters: Sequence[FilterSettings], *, model_folder: Path) -> list[Filter]:
    """Raises ValueError for one that can find nothing with this model, or whose function is not there."""
    return [_filter(one, model_folder) for one in filters]


def _filter(settings: FilterSettings, model_folder: Path) -> Filter:
    if settings.type == "repetition":
        window, threshold = settings.window, settings.prob_threshold
        return Repetition(window=window, prob_threshold=threshold, enforce=settings.enforce)
    if settings.type == "custom":
        function = find(settings.import_path, setting="filters.import_path")
        if not callable(function):
            raise NotFound(f"filters.import_path = {settings.import_path!r} is {function!r}, expected a function")
        chosen = partial(function, **settings.kwargs)
        return Custom(import_path=settings.import_path, function=chosen, enforce=settings.enforce)
    return Gibberish(
        token_id_threshold=settings.token_id_threshold,
        logprob_offset=settings.logprob_offset,
        vocab_size=vocab_size(model_folder),
        enforce=settings.enforce,
    )


def vocab_size(model_folder: Path) -> int:
    """Of a model in Hugging Face format. Raises ValueError where its configuration does not say."""
    config = json.loads((model_folder / "config.json").read_bytes())
    for fields in (config, config.get("text_config", {})):
        if isinstance(size := fields.get("vocab_size"), int):
            return size
    raise ValueError(f"{model_folder / 'config.json'} has no vocab_size, which filters of type gibberish need")
