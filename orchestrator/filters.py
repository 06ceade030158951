"""Rollouts that have gone astray, found by their tokens and log-probabilities alone.

Legend: `L` sampled tokens of one answer, `V` vocabulary.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from configs.rollouts import FilterSettings


class Detector(Protocol):
    """Looks at one answer."""

    def found_at(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> int | None:
        """The place of the first token by which it shows, or None. Log-probabilities are natural ones, as sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gibberish:
    """A token with an id above `token_id_threshold` and a log-probability below -log(V) - `logprob_offset`.

    Byte-pair vocabularies number tokens by how often they were seen, so high ids are rare. A uniform draw from the
    vocabulary has the log-probability -log(V): what is that unlikely was drawn from the tail.
    Example: ``Gibberish(token_id_threshold=100_000, logprob_offset=2.0, vocab_size=151_936)``: below -13.93.
    """

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

    def found_at(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> int | None:
        rare = np.asarray(token_ids_L, np.int64) > self.token_id_threshold
        unlikely = np.asarray(logprobs_L, np.float64) < -math.log(self.vocab_size) - self.logprob_offset
        return _first(rare & unlikely)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """`window` tokens in a row, each with a probability above `prob_threshold`: the policy only copies what is there.

    Example: ``Repetition(window=3000, prob_threshold=0.99)``
    """

    window: int
    prob_threshold: float

    def found_at(self, token_ids_L: Sequence[int], logprobs_L: Sequence[float]) -> int | None:
        """The place of the token that makes the window full."""
        certain = np.asarray(logprobs_L, np.float64) > math.log(self.prob_threshold)
        places = np.arange(1, len(certain) + 1)
        last_uncertain = np.maximum.accumulate(np.where(certain, 0, places))
        return _first(places - last_uncertain >= self.window)


def _first(found: NDArray[np.bool_]) -> int | None:
    """The first place that is True."""
    return int(found.argmax()) if found.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A detector and what its finding means."""

    name: str
    """`gibberish` or `repetition`."""
    detector: Detector
    enforce: bool
    """Keep what is found out of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the filters say about one rollout. Example: ``Verdict(found=("repetition",), withheld="repetition")``"""

    found: tuple[str, ...] = ()
    """Names of the filters that found something."""
    withheld: str | None = None
    """The first of them that is enforced."""


def judge(filters: Sequence[Filter], answers: Sequence[tuple[Sequence[int], Sequence[float]]]) -> Verdict:
    """What `filters` say about a rollout with these answers, each as token ids [L] and log-probabilities [L]."""
    finders = [
        one
        for one in filters
        if any(one.detector.found_at(ids_L, logprobs_L) is not None for ids_L, logprobs_L in answers)
    ]
    enforced = [one.name for one in finders if one.enforce]
    return Verdict(found=tuple(one.name for one in finders), withheld=enforced[0] if enforced else None)


# --- from settings ---


def make_filters(filters: Sequence[FilterSettings], *, model_folder: Path) -> list[Filter]:
    """Raises ValueError for one that can find nothing with this model."""
    return [Filter(name=one.type, detector=_detector(one, model_folder), enforce=one.enforce) for one in filters]


def _detector(settings: FilterSettings, model_folder: Path) -> Detector:
    if settings.type == "repetition":
        return Repetition(window=settings.window, prob_threshold=settings.prob_threshold)
    return Gibberish(
        token_id_threshold=settings.token_id_threshold,
        logprob_offset=settings.logprob_offset,
        vocab_size=vocab_size(model_folder),
    )


def vocab_size(model_folder: Path) -> int:
    """Of a model in Hugging Face format. Raises ValueError where its configuration does not say."""
    config = json.loads((model_folder / "config.json").read_bytes())
    for fields in (config, config.get("text_config", {})):
        if isinstance(size := fields.get("vocab_size"), int):
            return size
    raise ValueError(f"{model_folder / 'config.json'} has no vocab_size, which filters of type gibberish need")
