import json
import math

import torch
from grpo.trainer.metrics import Max, Mean, Metric, Min, Sum, numbers_of, reduced, states_of

from tests.trainer.models import as_floats


def scalar(number: float) -> torch.Tensor:
    return torch.tensor(number)


ONE_RANK: dict[str, Metric] = {
    "sum": Sum(scalar(3.0)),
    "mean": Mean(scalar(6.0), scalar(2.0)),
    "min": Min(scalar(-1.0)),
    "max": Max(scalar(5.0)),
}
OTHER_RANK: dict[str, Metric] = {
    "sum": Sum(scalar(0.5)),
    "mean": Mean(scalar(4.0), scalar(8.0)),
    "min": Min(scalar(-2.0)),
    "max": Max(scalar(4.0)),
    "only_here": Mean(scalar(1.0), scalar(4.0)),
}
# 3 + 0.5; (6 + 4) / (2 + 8); min(-1, -2); max(5, 4); 1 / 4
TOGETHER = {"sum": 3.5, "mean": 1.0, "min": -2.0, "max": 5.0, "only_here": 0.25}


def test_parts_reduce_by_their_kind_also_as_the_plain_states_that_ranks_exchange() -> None:
    assert as_floats(ONE_RANK, OTHER_RANK) == TOGETHER
    sent = (json.loads(json.dumps(state)) for part in (ONE_RANK, OTHER_RANK) for state in states_of([part]))
    assert numbers_of(reduced(sent)) == TOGETHER


def test_a_mean_over_weights_below_one_is_divided_by_them_and_one_of_nothing_is_zero() -> None:
    assert as_floats({"a": Mean(scalar(0.25), scalar(0.5)), "b": Mean(scalar(0.0), scalar(0.0))}) == {"a": 0.5, "b": 0}


def test_what_met_a_nan_is_nan() -> None:
    for kind in (Min, Max, Sum):
        for values in ((1.0, math.nan), (math.nan, 1.0)):
            assert math.isnan(as_floats(*({"x": kind(scalar(value))} for value in values))["x"])
