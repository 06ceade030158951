"""Adapters of several tenants on one base, without a service around them."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpo.configs.loss import LossSettings
from grpo.service.errors import Refused
from grpo.service.training import WITNESS, AdapterShape, Base, TrainedModel
from grpo.service.wire import ForwardBackward
from grpo.trainer.distributed import ONE
from grpo.trainer.objective import Objective
from grpo.trainer.optim import Optimizer
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from tests.service.data import SHAPE, datum, finished, request_of, tiny_base, trained
from tests.trainer.models import save_tiny_model, tiny_batch, tiny_policy, tiny_settings


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def base(model_folder: Path) -> Base:
    return tiny_base(model_folder, micro_batch_tokens=128)


@pytest.fixture
def model(base: Base) -> Any:
    made = TrainedModel(base, SHAPE)
    yield made
    made.close()


def gradients(model: TrainedModel) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in model._gradients.items() if name != WITNESS}


def test_the_gradient_is_the_trainers_to_the_last_bit(tmp_path: Path) -> None:
    """The same samples, loss and micro-batch through the trainer's objective and through the service."""
    base = tiny_base(tmp_path, micro_batch_tokens=128)
    policy = tiny_policy(tmp_path, moved=False, lora_alpha=32, seed=SHAPE.seed, micro_batch_tokens=128)
    batch = tiny_batch((9, 14), seed=1)
    starts = np.cumsum(batch.sequence_lengths) - batch.sequence_lengths
    mask = np.ones(23, np.bool_)
    mask[starts] = False
    draw = np.random.default_rng(0)
    sampled = np.where(mask, -4 + 0.3 * draw.standard_normal(23), 0).astype(np.float32)
    advantages = np.where(mask, draw.standard_normal(23), 0).astype(np.float32)
    temperatures = np.ones(23, np.float32)
    batch = replace(batch, loss_mask=mask, inference_logprobs=sampled, advantages=advantages, temperatures=temperatures)
    masks: Any = {"geo_mask_low": 0, "geo_mask_high": None, "sequence_mask_high": None}
    # By the trainer's normaliser, 1 / N, whose N the protocol's sums do not have.
    settings = LossSettings(importance="none", normaliser="constant", constant_tokens=1, **masks)
    objective = Objective(policy, settings, ONE, pack_tokens=128)
    objective.accumulate([batch], step=1)
    number = len(batch.sequence_lengths)  # of samples, a power of two, which divides exactly

    data = [
        datum(
            int(length) - 1,
            0,
            "importance_sampling",
            target_tokens=batch.token_ids[start + 1 : start + length].astype(np.int64),
            logprobs=sampled[start + 1 : start + length],
            advantages=advantages[start + 1 : start + length],
        )
        for start, length in zip(starts, batch.sequence_lengths, strict=True)
    ]
    request = request_of(data, "importance_sampling")
    for one, start, length in zip(request.data, starts, batch.sequence_lengths, strict=True):
        one.token_ids.setflags(write=True)
        one.token_ids[:] = batch.token_ids[start : start + length - 1]
    model = TrainedModel(base, SHAPE)
    finished(model.forward_backward(request))

    found, expected = gradients(model).values(), policy.parameters
    assert any(parameter.grad.any() for parameter in expected)
    for gradient, parameter in zip(found, expected, strict=True):
        assert torch.equal(gradient, parameter.grad * number)


def test_losses_are_sums_and_add_up_over_requests_until_the_step(model: TrainedModel) -> None:
    one, two = datum(9, 1), datum(12, 2)
    first = finished(model.forward_backward(request_of([one])))
    second = finished(model.forward_backward(request_of([two])))
    added = gradients(model)
    model.drop_gradients()
    both = finished(model.forward_backward(request_of([one, two])))
    assert both.metrics["loss:sum"] == pytest.approx(first.metrics["loss:sum"] + second.metrics["loss:sum"], rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, added[name], rtol=1e-4, atol=1e-5)


def test_targets_need_not_be_the_next_tokens(model: TrainedModel, model_folder: Path) -> None:
    """A target is predicted from the tokens up to its place, whatever follows there."""
    plain = datum(9, 1)
    other = datum(9, 1, target_tokens=np.full(9, 5, np.int64))
    outputs = [finished(model.forward_backward(request_of([one]))).loss_fn_outputs[0] for one in (plain, other)]
    found = [np.frombuffer(output.fields["logprobs"].data, np.float32) for output in outputs]
    ids = torch.tensor([plain.model_input.to_ints()])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model_folder)(ids).logits[0].log_softmax(-1)
    targets = torch.tensor(plain.loss_fn_inputs["target_tokens"].to_numpy())
    np.testing.assert_allclose(found[0], expected[torch.arange(9), targets].numpy(), atol=1e-4)
    np.testing.assert_allclose(found[1], expected[:, 5].numpy(), atol=1e-4)


def test_several_candidates_of_a_token_are_as_many_targets(model: TrainedModel) -> None:
    """A loss and a gradient that are the sums of those with one candidate each."""
    draw, one = np.random.default_rng(0), datum(9, 1)
    targets, weights = draw.integers(2, 64, (9, 3)), draw.random((9, 3)).astype(np.float32)
    found = finished(model.forward_backward(request_of([datum(9, 1, target_tokens=targets, weights=weights)])))
    both = gradients(model)
    model.drop_gradients()
    losses, logprobs = 0.0, []
    for k in range(3):
        inputs = {"target_tokens": targets[:, k].copy(), "weights": weights[:, k].copy()}
        answer = finished(model.forward_backward(request_of([datum(9, 1, **inputs)])))
        losses += answer.metrics["loss:sum"]
        logprobs.append(np.frombuffer(answer.loss_fn_outputs[0].fields["logprobs"].data, np.float32))
    assert found.metrics["loss:sum"] == pytest.approx(losses, rel=1e-6)
    field = found.loss_fn_outputs[0].fields["logprobs"]
    assert list(field.trailing_shape) == [3]
    np.testing.assert_allclose(np.frombuffer(field.data, np.float32).reshape(9, 3), np.stack(logprobs, 1), atol=1e-5)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(both[name], gradient, rtol=1e-4, atol=1e-5)
    model.drop_gradients()
    finished(model.forward_backward(request_of([datum(9, 1, target_tokens=targets, weights=weights)])))
    model.optim_step({"learning_rate": 1e-3})
    with pytest.raises(Refused, match="one number in a request"):
        request_of([one, datum(9, 1, target_tokens=targets, weights=weights)])


def test_forward_alone_leaves_no_gradient(model: TrainedModel) -> None:
    request = request_of([datum(9, 1)])
    finished(
        model.forward_backward(type(request)(data=request.data, loss_fn=request.loss_fn, config={}, forward_only=True))
    )
    assert not model.has_gradients


def test_a_step_is_the_trainers(model: TrainedModel) -> None:
    """Clipping, AdamW's figures, and their order."""
    finished(model.forward_backward(request_of([datum(9, 1)])))
    clones = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.policy.named_parameters.items()}
    for name, clone in clones.items():
        clone.grad = gradients(model)[name].clone()
    figures: Any = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_epsilon": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
    }
    norm = Optimizer(tiny_settings(Path(), **figures), clones).step(learning_rate=1e-2)
    adam = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.1, "grad_clip_norm": 0.5}
    assert model.optim_step(adam) == {"grad_norm": norm}
    for name, parameter in model.policy.named_parameters.items():
        assert torch.equal(parameter, clones[name])
    assert not model.has_gradients


def test_a_tenant_has_the_same_bytes_alone_and_beside_seven_others(tmp_path: Path) -> None:
    """Models of different ranks, layers, losses and sizes: each alone, then all in passes of random company."""
    widths = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    save_tiny_model(tmp_path / "model", **widths)
    base = Base(
        tiny_settings(tmp_path / "model", micro_batch_tokens=512), tmp_path / "model", torch.device("cpu"), max_rank=64
    )
    draw = np.random.default_rng(0)
    layers = [(True, True), (True, False), (False, True)]
    shapes = [
        AdapterShape(rank=int(draw.choice([1, 3, 8, 32])), seed=number, attn=attn, mlp=mlp)
        for number, (attn, mlp) in enumerate(draw.choice(layers, 8).tolist())
    ]
    requests = [[_random_request(draw) for _ in range(3)] for _ in shapes]

    def steps(model: TrainedModel, number: int) -> Any:
        for request in requests[number]:
            yield from model.forward_backward(request)
            model.optim_step({"learning_rate": 1e-2})

    def saved(model: TrainedModel, name: str) -> list[bytes]:
        model.save(tmp_path / name, seq=1)
        model.close()
        return [file.read_bytes() for file in sorted((tmp_path / name).glob("*.safetensors"))]

    alone = []
    for number, shape in enumerate(shapes):
        model = TrainedModel(base, shape)
        _computed_in_company([steps(model, number)], base, draw)
        alone.append(saved(model, f"alone{number}"))
    models = [TrainedModel(base, shape) for shape in shapes]
    sizes = _computed_in_company([steps(model, number) for number, model in enumerate(models)], base, draw)
    assert max(sizes) >= 4, "passes are shared"
    assert [saved(model, f"together{number}") for number, model in enumerate(models)] == alone
    assert len(set(map(tuple, alone))) == len(alone)


def _random_request(draw: np.random.Generator) -> ForwardBackward:
    """A few datums of 1 to 100 tokens."""
    loss_fn, longest = str(draw.choice(["cross_entropy", "ppo", "gspo"])), int(draw.choice([3, 12, 100]))
    lengths = draw.integers(1, longest + 1, int(draw.integers(1, 7)))
    return request_of([datum(int(length), int(draw.integers(1 << 30)), loss_fn) for length in lengths], loss_fn)


def _computed_in_company(works: list[Any], base: Base, draw: np.random.Generator) -> list[int]:
    """Computes until all have ended, each pass with as many others as a throw of the dice lets join. Returns how many
    were in each pass."""
    asked = {work: next(work) for work in works}
    sizes = []
    while asked:
        joined: list[Any] = []
        for work in draw.permutation(np.array(list(asked), object)):
            if not joined or (draw.random() < 0.7 and base.can_join([asked[one] for one in joined], asked[work])):
                joined.append(work)
        sizes.append(len(joined))
        results = base.compute([asked.pop(work) for work in joined])
        for work, result in zip(joined, results, strict=True):
            with contextlib.suppress(StopIteration):
                asked[work] = work.send(result)
    return sizes


def test_a_model_goes_on_from_its_state_with_the_same_bytes(base: Base, model: TrainedModel, tmp_path: Path) -> None:
    trained(model, steps=2, seed=1)
    model.save(tmp_path / "state", seq=7)
    resumed = TrainedModel(base, SHAPE)
    assert resumed.load(tmp_path / "state", optimizer=True) == 7
    plain = TrainedModel(base, SHAPE)
    plain.load(tmp_path / "state", optimizer=False)
    assert plain.files() == resumed.files() == model.files()
    for one in (model, resumed, plain):
        trained(one, steps=2, seed=2)
    assert resumed.files() == model.files()
    assert plain.files() != model.files(), "without the optimizer's state steps are others"
    model.save(tmp_path / "sampler", seq=8, optimizer=False)
    plain.load(tmp_path / "sampler", optimizer=False)
    assert plain.files() == model.files()
    with pytest.raises(Refused, match="no optimizer"):
        plain.load(tmp_path / "sampler", optimizer=True)
    with pytest.raises(Refused, match="rank"):
        TrainedModel(base, AdapterShape(rank=8, seed=3, attn=True, mlp=True)).load(tmp_path / "state", optimizer=True)


def test_what_is_not_finite_changes_nothing(model: TrainedModel) -> None:
    finished(model.forward_backward(request_of([datum(9, 1)])))
    before = {name: gradient.clone() for name, gradient in gradients(model).items()}
    request = request_of(
        [datum(9, 2, "importance_sampling", advantages=np.full(9, 3e38, np.float32))], "importance_sampling"
    )
    with pytest.raises(Refused, match="not finite"):
        finished(model.forward_backward(request))
    assert all(torch.equal(gradient, before[name]) for name, gradient in gradients(model).items())

    weights = model.files()
    finished(model.forward_backward(request_of([datum(9, 2, weights=np.full(9, 1e36, np.float32))])))
    with pytest.raises(Refused, match="norm"):
        model.optim_step({"learning_rate": 1e-2})
    assert model.files() == weights
    assert not model.has_gradients


@pytest.mark.parametrize(
    ("adam", "named"),
    [({"beta1": 1.0}, "beta1"), ({"learning_rate": float("nan")}, "learning_rate"), ({"momentum": 0.9}, "momentum")],
)
def test_figures_that_no_adam_has_are_refused(model: TrainedModel, adam: dict[str, float], named: str) -> None:
    with pytest.raises(Refused, match=named):
        model.optim_step(adam)
