"""The pure parts of the loops, made from the settings."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.orch import OrchSettings
from configs.rollouts import FilterSettings
from orchestrator.advantage import (
    AdvantageFunction,
    ConstantCredit,
    CreditAssigner,
    EpisodicCredit,
    GroupCredit,
    custom_advantage,
    custom_credit,
    group_relative,
    leave_one_out,
    length_weighted,
    normalised,
)
from orchestrator.buffer import Buffer
from orchestrator.filters import Filter, Gibberish, Repetition
from orchestrator.temperature import temperature_schedule

log = logging.getLogger(__name__)


def make_buffer(
    settings: OrchSettings,
    keys: Mapping[str, Sequence[str]],
    state: Mapping[str, Any] | None = None,
    pools: Mapping[str, str] | None = None,
) -> Buffer:
    """`keys`: the identities of each environment's examples. `state` and `pools`: to go on from, of which a share of
    the easy and of the hard examples is asked again."""
    chosen = settings.buffer
    buffer = Buffer(
        keys,
        seed=settings.seed if chosen.seed is None else chosen.seed,
        env_ratios=chosen.env_ratios,
        easy_threshold=chosen.easy_threshold,
        hard_threshold=chosen.hard_threshold,
        online_difficulty_filtering=chosen.online_difficulty_filtering,
    )
    for env, num in buffer.num_duplicates.items():
        log.info("environment %s: left out %d examples that are there already, by buffer.hash_keys", env, num)
    if state is not None:
        if num_lost := buffer.restore(state, pools or {}):
            log.warning("%d examples that the run knew are no longer in its environments", num_lost)
        buffer.promote(easy_fraction=chosen.easy_fraction, hard_fraction=chosen.hard_fraction)
    return buffer


def make_credit(settings: OrchSettings) -> CreditAssigner:
    """Raises ValueError where `advantage.import_path` leads to nothing that can be called."""
    chosen = settings.advantage
    if chosen.type == "constant":
        return ConstantCredit(value=chosen.value)
    if chosen.type == "episodic":
        return EpisodicCredit()
    if chosen.type == "custom_credit":
        return custom_credit(chosen.import_path, chosen.kwargs, setting="advantage.import_path")
    function: AdvantageFunction
    if chosen.type == "normalized":
        function = normalised
    elif chosen.type == "leave_one_out":
        function = leave_one_out
    elif chosen.type == "custom":
        function = custom_advantage(chosen.import_path, chosen.kwargs)
    else:
        function = length_weighted if chosen.length_weighted_mean else group_relative
    return GroupCredit(advantage=function, positive_only=chosen.positive_only)


def make_temperature(settings: OrchSettings) -> Callable[[int], float]:
    """Temperature by policy version."""
    sampling = settings.sampling
    if (schedule := sampling.temp_scheduler) is None:
        return lambda version: sampling.temperature
    assert settings.max_steps is not None
    return temperature_schedule(
        schedule.type,
        start_temperature=schedule.start_temperature,
        end_temperature=schedule.end_temperature,
        max_steps=settings.max_steps,
    )


def make_filters(filters: Sequence[FilterSettings], *, model_folder: Path) -> list[Filter]:
    """Raises ValueError for one that can find nothing with this model."""
    return [_filter(one, model_folder) for one in filters]


def _filter(settings: FilterSettings, model_folder: Path) -> Filter:
    detector: Gibberish | Repetition
    if settings.type == "gibberish":
        detector = Gibberish(
            token_id_threshold=settings.token_id_threshold,
            logprob_offset=settings.logprob_offset,
            vocab_size=vocab_size(model_folder),
        )
    else:
        detector = Repetition(window=settings.window, prob_threshold=settings.prob_threshold)
    return Filter(name=settings.type, detector=detector, enforce=settings.enforce)


def vocab_size(model_folder: Path) -> int:
    """Of a model in Hugging Face format. Raises ValueError where its configuration does not say."""
    config = json.loads((model_folder / "config.json").read_bytes())
    for fields in (config, config.get("text_config", {})):
        if isinstance(size := fields.get("vocab_size"), int):
            return size
    raise ValueError(f"{model_folder / 'config.json'} has no vocab_size, which filters of type gibberish need")
