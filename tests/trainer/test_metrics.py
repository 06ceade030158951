import json
import math

import pytest
import torch

from trainer.metrics import Largest, Mean, Metric, Smallest, Total, as_floats, from_state, merge


def scalar(number: float) -> torch.Tensor:
    return torch.tensor(number)


ONE_RANK: dict[str, Metric] = {
    "total": Total(scalar(3.0)),
    "mean": Mean(scalar(6.0), scalar(2.0)),
    "smallest": Smallest(scalar(-1.0)),
    "largest": Largest(scalar(5.0)),
}
OTHER_RANK: dict[str, Metric] = {
    "total": Total(scalar(0.5)),
    "mean": Mean(scalar(4.0), scalar(8.0)),
    "smallest": Smallest(scalar(-2.0)),
    "largest": Largest(scalar(4.0)),
    "only_here": Mean(scalar(1.0), scalar(4.0)),
}
# 3 + 0.5; (6 + 4) / (2 + 8); min(-1, -2); max(5, 4); 1 / 4
TOGETHER = {"total": 3.5, "mean": 1.0, "smallest": -2.0, "largest": 5.0, "only_here": 0.25}


def test_parts_reduce_by_their_kind() -> None:
    assert as_floats(merge([ONE_RANK, OTHER_RANK])) == TOGETHER


def test_ranks_that_exchange_plain_states_reduce_to_the_same() -> None:
    def over_the_wire(metrics: dict[str, Metric]) -> dict[str, Metric]:
        states = json.loads(json.dumps({key: metric.state() for key, metric in metrics.items()}))
        return {key: from_state(tuple(state)) for key, state in states.items()}

    assert as_floats(merge(map(over_the_wire, (ONE_RANK, OTHER_RANK)))) == TOGETHER


@pytest.mark.parametrize("metric", OTHER_RANK.values(), ids=OTHER_RANK.keys())
def test_a_state_gives_the_metric_again(metric: Metric) -> None:
    again = from_state(metric.state())
    assert type(again) is type(metric)
    assert again.state() == metric.state()


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind 'median', expected one of \['largest', 'mean', 'smallest', 'total'\]"):
        from_state(("median", 1.0, 0.0))


def test_a_mean_over_weights_below_one_is_divided_by_them() -> None:
    assert Mean(scalar(0.25), scalar(0.5)).number() == 0.5


def test_a_mean_of_nothing_is_zero_and_one_of_nan_is_nan() -> None:
    assert Mean(scalar(0.0), scalar(0.0)).number() == 0.0
    assert math.isnan(Mean(scalar(math.nan), scalar(2.0)).number())


def test_a_minimum_or_maximum_that_met_a_nan_is_nan() -> None:
    for kind in (Smallest, Largest):
        assert math.isnan(kind(scalar(1.0)).merged(kind(scalar(math.nan))).number())
