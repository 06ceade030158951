"""Rollouts that have gone astray, found by their tokens and log-probabilities alone.

Legend: `L` sampled tokens of one answer, `V` vocabulary.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from grpo.configs.rollouts import FilterSettings
from grpo.orchestrator.rollouts.messages import shown
from grpo.transport.errors import UserError
from grpo.transport.importing import FunctionFailed, called, load_object
from grpo.transport.records import Float32, Int32

Finds = Callable[[Int32, Float32], bool]
"""`(token ids [L], natural log-probabilities [L], as sampled) -> whether it shows in this answer`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Looks at one answer. Example: ``Filter(name="repetition", finds=partial(is_repetition, window=9, ...))``"""

    name: str
    """As in the settings and metrics."""
    finds: Finds
    enforce: bool = False
    """Keep what is found out of the loss."""


def is_gibberish(
    token_ids_L: Int32,
    logprobs_L: Float32,
    *,
    token_id_threshold: int,
    logprob_offset: float,
    vocab_size: int,
) -> bool:
    """Whether there is a token with an id above `token_id_threshold` and a log-probability below -log(V) -
    `logprob_offset` nats.

    Byte-pair vocabularies number tokens by how often they were seen, so high ids are rare. A uniform draw from the
    vocabulary has the log-probability -log(V): what is that unlikely was drawn from the tail.
    Example: ``token_id_threshold=100_000, logprob_offset=2.0, vocab_size=151_936``: below -13.93.
    """
    rare = np.asarray(token_ids_L, np.int64) > token_id_threshold
    unlikely = np.asarray(logprobs_L, np.float64) < -math.log(vocab_size) - logprob_offset
    return bool(np.any(rare & unlikely))


def is_repetition(token_ids_L: Int32, logprobs_L: Float32, *, window: int, prob_threshold: float) -> bool:
    """Whether `window` tokens in a row have each a probability above `prob_threshold`: the policy only copies what is
    there."""
    certain = np.asarray(logprobs_L, np.float64) > math.log(prob_threshold)
    places = np.arange(1, len(certain) + 1)
    last_uncertain = np.maximum.accumulate(np.where(certain, 0, places))
    return bool(np.any(places - last_uncertain >= window))


def make_filters(filters: Sequence[FilterSettings], *, model_folder: Path) -> list[Filter]:
    """Raises ValueError for one that can find nothing with this model, or whose function is not there."""
    return [Filter(name=one.type, finds=_finds(one, model_folder), enforce=one.enforce) for one in filters]


def _finds(settings: FilterSettings, model_folder: Path) -> Finds:
    if settings.type == "repetition":
        return partial(is_repetition, window=settings.window, prob_threshold=settings.prob_threshold)
    if settings.type == "custom":
        return _custom(settings.import_path, settings.kwargs)
    threshold, size = settings.token_id_threshold, vocab_size(model_folder)
    if threshold >= size - 1:
        raise ValueError(
            f"filters: token_id_threshold = {threshold} finds nothing: the model's token ids end at {size - 1}; lower "
            "it, or remove the filter of type gibberish"
        )
    return partial(is_gibberish, token_id_threshold=threshold, logprob_offset=settings.logprob_offset, vocab_size=size)


def _custom(import_path: str, kwargs: dict[str, object]) -> Finds:
    """Wraps a user's function. Calls raise FunctionFailed where it raises, or returns neither True nor False."""
    function = load_object(import_path, setting="filters.import_path")
    if not callable(function):
        raise UserError(f"filters.import_path = {import_path!r} is {function!r}, expected a function")

    def finds(token_ids_L: Int32, logprobs_L: Float32) -> bool:
        name = f"filters.import_path = {import_path!r}"
        found = called(name, partial(function, **kwargs), token_ids_L.tolist(), logprobs_L.tolist())
        if not isinstance(found, bool | np.bool_):
            raise FunctionFailed(f"{name} returned {shown(found)}, expected a bool")
        return bool(found)

    return finds


def vocab_size(model_folder: Path) -> int:
    """Returns the size of the vocabulary of a model in Hugging Face format. Raises ValueError where its configuration
    does not say."""
    config = json.loads((model_folder / "config.json").read_bytes())
    for fields in (config, config.get("text_config", {})):
        if isinstance(size := fields.get("vocab_size"), int):
            return size
    raise ValueError(f"{model_folder / 'config.json'} has no vocab_size, which filters of type gibberish need")
