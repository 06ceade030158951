"""Gibberish and repetition, found by tokens and log-probabilities."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpo.orchestrator.filters import Filter, is_gibberish, is_repetition, make_filters

from tests.orchestrator.fakes import MODEL, settings_for


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "is_found"),
    [
        ([51, 7], [-6.61, 0.0], True),
        ([7, 99, 60], [-9.0, -6.6, -7.0], True),  # and both
        ([50], [-9.0], False),  # the threshold itself is not above it
        ([], [], False),
    ],
)
def test_gibberish_is_a_rare_token_less_likely_than_a_uniform_draw_by_the_offset(
    token_ids: list[int], logprobs: list[float], is_found: bool
) -> None:
    # -log(100) = -4.605; two nats below is -6.605.
    assert is_gibberish(token_ids, logprobs, token_id_threshold=50, logprob_offset=2.0, vocab_size=100) == is_found


@pytest.mark.parametrize(
    ("logprobs", "is_found"),
    [
        ([-0.1, -0.1, -0.1], True),
        ([-0.1, -0.1, -0.11, -0.1, -0.1], False),  # the third token breaks the row
        ([math.log(0.9)] * 3, False),  # the threshold itself is not above it
        ([], False),
    ],
)
def test_repetition_is_a_window_of_tokens_in_a_row_above_the_probability(logprobs: list[float], is_found: bool) -> None:
    assert is_repetition([1] * len(logprobs), logprobs, window=3, prob_threshold=0.9) == is_found


OWN = """
def long(token_ids, logprobs, limit):
    return len(token_ids) == len(logprobs) > limit

def wrong(token_ids, logprobs):
    return "yes"
"""


def found(one: Filter, ids: list[int], logprob: float) -> bool:
    """What a filter says of tokens with that log-probability each."""
    return one.finds(np.array(ids, np.int32), np.full(len(ids), logprob, np.float32))


def test_settings_name_a_filter_which_may_be_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)

    def made(**settings: Any) -> Filter:
        given = {"client": {}, "filters": [settings]}
        return make_filters(settings_for(tmp_path, **given).filters, model_folder=MODEL)[0]

    own = made(type="custom", import_path=f"{path}:long", kwargs={"limit": 2})
    assert [found(own, [1] * num, -1.0) for num in (2, 3)] == [False, True]
    repetition = made(type="repetition", window=2, prob_threshold=0.9)
    assert [found(repetition, [1] * num, -0.1) for num in (1, 2)] == [False, True]
    gibberish = made(type="gibberish", token_id_threshold=50, logprob_offset=2.0)  # -log(259) - 2 = -7.557
    assert [found(gibberish, [51], logprob) for logprob in (-7.5, -7.6)] == [False, True]
    with pytest.raises(ValueError, match="token_id_threshold"):  # which no id can exceed
        made(type="gibberish", token_id_threshold=258)
    with pytest.raises(ValueError, match="import_path"):
        found(made(type="custom", import_path=f"{path}:wrong"), [1], -1.0)
    with pytest.raises(ValueError, match="import_path"):
        made(type="custom", import_path=f"{path}:nobody")
