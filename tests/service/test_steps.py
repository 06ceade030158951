"""What a step tells of itself: its witness and its figures."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from grpo.service import training
from grpo.service.errors import Refused
from grpo.service.training import Pass, TrainedModel
from grpo.transport.witness import TOLERANCE
from msgspec.structs import asdict

from tests.service.data import SHAPE, datum, finished, request_of, tiny_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_base(tmp_path_factory.mktemp("model"), micro_batch_tokens=128)


@pytest.fixture
def model(base: Any) -> Iterator[TrainedModel]:
    made = TrainedModel(base, SHAPE)
    yield made
    made.close()


def requests(loss_fn: str = "importance_sampling") -> list[Any]:
    """Two requests of several micro-batches each."""
    given = [[datum(30 + number, 10 * which + number, loss_fn) for number in range(7)] for which in range(2)]
    return [request_of(data, loss_fn, seq=seq) for seq, data in enumerate(given, start=4)]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_a_step_bears_the_witness_of_its_datums(model: TrainedModel, loss_fn: str) -> None:
    for request in requests(loss_fn):
        finished(model.forward_backward(request))
    model.optim_step({"learning_rate": 1e-3})
    step = model.last_step
    assert step is not None
    for name, size in (("presence", step.expected.presence_size), ("content", step.expected.content_size)):
        gaps = np.subtract(asdict(step.witness)[name], asdict(step.expected)[name])
        assert np.abs(gaps).max() <= TOLERANCE * size
        assert np.abs(asdict(step.witness)[name]).max() > 0


def test_a_pass_that_is_lost_refuses_the_step_by_its_datum(
    model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, whole = model.files(), Pass.loss
    long = request_of([datum(90, number) for number in range(3)], seq=4)

    def losing(self: Pass, *given: Any) -> Any:
        loss, values = whole(self, *given)
        return (loss * 0 if given[0][0] is long.data[1] else loss), values

    monkeypatch.setattr(Pass, "loss", losing)
    finished(model.forward_backward(long))
    with pytest.raises(Refused, match=r"datum 4/1 .* counts 0 times"):
        model.optim_step({"learning_rate": 1e-2})
    assert (model.files(), model.has_gradients, model.last_step) == (weights, False, None)


def test_tokens_that_are_not_the_datums_refuse_the_step(model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request, packed = requests()[0], training.packed

    def wrong(batch: Any, device: Any) -> Any:
        tokens = packed(batch, device)
        tokens.targets[3] += 1
        return tokens

    monkeypatch.setattr(training, "packed", wrong)
    finished(model.forward_backward(request))
    with pytest.raises(Refused, match="its witness differs"):
        model.optim_step({"learning_rate": 1e-2})


def test_a_steps_figures_are_those_of_its_datums(model: TrainedModel) -> None:
    answers = [finished(model.forward_backward(request)) for request in requests()]
    norm = model.optim_step({"learning_rate": 1e-3})["grad_norm"]
    assert model.last_step is not None
    found = model.last_step.metrics()
    expected = sum(answer.metrics["loss:sum"] for answer in answers)
    assert found["loss/importance_sampling"] == pytest.approx(expected)
    assert (found["optim/grad_norm"], found["optim/learning_rate"]) == (norm, 1e-3)
    assert found["policy/tokens"] == 2 * sum(range(30, 37))
    now = [np.frombuffer(one.loss_fn_outputs[0].fields["logprobs"].data, np.float32) for one in answers]
    then = [one.inputs["logprobs"] for request in requests() for one in request.data]
    gaps = (np.concatenate(now) - np.concatenate(then)).astype(np.float64)
    assert found["policy/log_ratio_mean"] == pytest.approx(gaps.mean(), rel=1e-5)
    assert found["policy/kl"] == pytest.approx((np.exp(gaps) - 1 - gaps).mean(), rel=1e-5)
