"""Log-probabilities and entropies fused with the LM head."""

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grpo.trainer.lm_head import (
    COMPILED_POSITIONS,
    COMPILED_VOCABULARY,
    _compiled_fold,
    _fold,
    logprobs_and_entropy,
)
from grpo.trainer.memory import missing_for_compile
from torch._dynamo.backends.debugging import aot_eager

from tests.trainer.tiles import LargestTensor

SIZES = [1, 50, 1 << 20]
"""Elements of a tile: a single logit, several positions, everything."""


def token_logprobs(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    return logprobs_and_entropy(*inputs, **options)[0]


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T / temps[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """17 hidden states of 8, a head of 11 tokens, targets that hold the first and the last token, temperatures."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=dtype) for n in (17, 11))
    targets = torch.randint(0, 11, (17,), generator=generator)
    targets[:2] = torch.tensor([0, 10])
    return hidden, weight, targets, torch.rand(17, generator=generator, dtype=dtype) + 0.3


@pytest.mark.parametrize(
    ("tile_elements", "trained"), [*((size, (True, True)) for size in SIZES), (23, (True, False)), (23, (False, True))]
)
def test_values_and_gradients_equal_plain_autograd_whatever_the_tiles(
    tile_elements: int, trained: tuple[bool, bool]
) -> None:
    hidden, weight, targets, temperatures = inputs(0)
    grad = torch.randn(17, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    results = []
    for function in (plain, lambda *given: token_logprobs(*given, tile_elements=tile_elements)):
        variables = [x.clone().requires_grad_(on) for x, on in zip((hidden, weight), trained, strict=True)]
        values = function(*variables, targets, temperatures)
        of = [variable for variable in variables if variable.requires_grad]
        results.append([values, *torch.autograd.grad(values, of, grad)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("head_is_trained", [False, True])
def test_the_logits_of_all_positions_never_exist_at_once(head_is_trained: bool) -> None:
    """No tensor has more elements than a tile; hidden states [64, 4] and the head [100, 4] have fewer."""
    hidden = torch.randn(64, 4, requires_grad=True)
    weight, targets = torch.randn(100, 4, requires_grad=head_is_trained), torch.arange(64)
    with LargestTensor() as largest:
        token_logprobs(hidden, weight, targets, torch.ones(64), tile_elements=800).sum().backward()
    assert largest.elements <= 800


def test_a_target_that_is_nearly_certain_keeps_its_gradient() -> None:
    """Where the target is nearly certain, the gradient is (1 - p) times differences of the head's rows: about 1e-9,
    which float32 would lose if it subtracted p · row from the row."""
    hidden, weight = torch.tensor([[30.0]], requires_grad=True), torch.tensor([[0.5], [-0.2], [-0.2]])
    value = token_logprobs(hidden, weight, torch.tensor([0]), torch.ones(1))
    (grad,) = torch.autograd.grad(value, hidden)
    # 1 - p = 2 exp(-21) / (1 + 2 exp(-21)), the difference of the rows is 0.7
    share = 2 * math.exp(-21) / (1 + 2 * math.exp(-21))
    torch.testing.assert_close(grad, torch.tensor([[0.7 * share]]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("rows", [[[-3e4], [0.0], [3e4]], [[3e4], [0.0], [-3e4]]], ids=["ascending", "descending"])
def test_extreme_logits_are_exact_and_finite_and_their_entropy_and_its_gradient_are_0(rows: list[list[float]]) -> None:
    """Logits far beyond the range of exp, one in a tile."""
    weight, hidden = torch.tensor(rows), torch.tensor([[1.0], [1.0]], requires_grad=True)
    targets, best = torch.tensor([1, int(weight.argmax())]), weight.max()
    values = token_logprobs(hidden, weight, targets, torch.ones(2), tile_elements=1)
    (grad,) = torch.autograd.grad(values.sum(), hidden)
    assert values.tolist() == [-best, 0.0]
    torch.testing.assert_close(grad, torch.tensor([[-best], [0.0]]))
    options: dict[str, Any] = {"differentiable": True, "tile_elements": 1}
    _, entropy = logprobs_and_entropy(hidden, weight, targets, torch.ones(2), **options)
    (grad,) = torch.autograd.grad(entropy.sum(), hidden)
    assert (entropy.tolist(), grad.tolist()) == ([0.0, 0.0], [[0.0], [0.0]])


def test_a_frozen_head_keeps_nothing_for_backward_but_one_tensor_of_the_hidden_states_size() -> None:
    hidden, weight, targets, temperatures = inputs(2)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        token_logprobs(hidden.requires_grad_(), weight, targets, temperatures)
        assert saved == [17 * 8]
        with torch.no_grad():
            token_logprobs(hidden, weight.requires_grad_(), targets, temperatures)
    assert saved == [17 * 8]


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (3, 50))
    targets = torch.tensor([1, 2, 3])
    logprobs = token_logprobs(hidden, weight, targets, torch.ones(3))
    expected = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)


def test_the_heads_gradient_in_bfloat16_is_summed_up_in_float32() -> None:
    # 400 equal positions in tiles of one: each adds 2^-12 to the target's row. A bfloat16 sum would stop at 256 of
    # them, 1/16, where the next is half a step.
    hidden, weight = torch.ones(400, 1).bfloat16(), torch.zeros(2, 1).bfloat16().requires_grad_()
    targets, temperatures = torch.zeros(400, dtype=torch.long), torch.full((400,), 2.0**11)
    values = token_logprobs(hidden, weight, targets, temperatures, tile_elements=1)
    (grad,) = torch.autograd.grad(values.sum(), weight)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.float(), torch.tensor([[1.0], [-1.0]]) * 400 / 2**12, rtol=2**-8, atol=0.0)


def test_a_hidden_state_that_is_not_a_number_is_not_hidden() -> None:
    hidden = torch.tensor([[math.nan], [1.0]], requires_grad=True)
    logprobs = token_logprobs(hidden, torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.ones(2))
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert logprobs.isnan().tolist() == [True, False]
    assert grad.isnan().tolist() == [[True], [False]]


def test_a_target_outside_the_vocabulary_is_not_taken_for_another() -> None:
    hidden, weight, temperatures = torch.ones(2, 1), torch.tensor([[1.0], [2.0]]), torch.ones(2)
    assert token_logprobs(hidden, weight, torch.tensor([2, 1]), temperatures).isnan().tolist() == [True, False]
    with pytest.raises(IndexError):
        token_logprobs(hidden.requires_grad_(), weight, torch.tensor([2, 1]), temperatures)


def test_no_positions_have_no_log_probabilities_and_give_the_head_no_gradient() -> None:
    hidden, weight = torch.zeros(0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    logprobs = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), torch.ones(0))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("tile_elements", SIZES)
def test_the_entropy_is_that_of_the_full_softmax_and_leaves_logprobs_as_they_are(tile_elements: int) -> None:
    hidden, weight, targets, temperatures = (x.float() if x.is_floating_point() else x for x in inputs(6))
    hidden = hidden.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperatures, tile_elements=tile_elements)
    exact = (hidden.detach().double() @ weight.double().T / temperatures.double()[:, None]).log_softmax(-1)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-6, rtol=1e-6)
    assert not entropy.requires_grad
    assert torch.equal(logprobs, token_logprobs(hidden, weight, targets, temperatures, tile_elements=tile_elements))


@pytest.mark.parametrize("tile_elements", [5, 1000])
def test_the_entropys_gradients_equal_finite_differences_whatever_the_tiles(tile_elements: int) -> None:
    hidden, weight, targets, temperatures = inputs(7)
    variables = hidden[:3].requires_grad_(), weight.requires_grad_()

    def outputs(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = targets[:3], temperatures[:3]
        return logprobs_and_entropy(h, w, *chosen, differentiable=True, tile_elements=tile_elements)

    assert torch.autograd.gradcheck(outputs, variables)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, of its own code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("differentiable", [False, True])
def test_the_body_of_a_tile_is_one_graph_that_computes_the_same(differentiable: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    logits, place = torch.randn(5, 7, generator=generator, dtype=dtype), torch.tensor([[0], [6], [-3], [9], [2]])
    zeros = torch.zeros(5, 1)
    sums = torch.full_like(zeros, torch.nan), torch.full_like(zeros, -1e30), zeros, zeros.clone()
    inputs = torch.rand(5, 1, generator=generator) + 0.5, place, *sums, differentiable
    compiled = torch.compile(_fold, backend="eager", fullgraph=True, dynamic=True)
    for one, other in zip(_fold(logits.clone(), *inputs), compiled(logits.clone(), *inputs), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def large_inputs() -> tuple[torch.Tensor, ...]:
    """The fewest positions and tokens of which tiles are compiled on a CPU, in several tiles."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (COMPILED_POSITIONS, COMPILED_VOCABULARY))
    targets = torch.randint(0, len(weight), (len(hidden),), generator=generator)
    return hidden, weight, targets, torch.rand(len(hidden), generator=generator) + 0.5


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An element for each graph that is compiled, up to the C++ of it, which takes some 20 s."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(len(inputs))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    _compiled_fold.cache_clear()
    yield graphs
    _compiled_fold.cache_clear()


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, of its own code
@pytest.mark.skipif(missing_for_compile(torch.device("cpu")) is not None, reason="needs a C++ compiler")
def test_only_large_tiles_are_compiled_on_a_cpu_and_give_the_same(compiled_graphs: list[int]) -> None:
    hidden, weight, targets, temperatures = large_inputs()
    for start, graphs in ((1, 0), (0, 1)):  # one position too few, and enough
        results = []
        for function in (plain, token_logprobs):
            variable = hidden[start:].clone().requires_grad_()
            values = function(variable, weight, targets[start:], temperatures[start:])
            results.append((values, *torch.autograd.grad(values.sum(), variable)))
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert len(compiled_graphs) == graphs


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "broken"])
def test_where_nothing_can_be_compiled_large_tiles_are_computed_all_the_same_and_it_is_said_once(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no header")

    monkeypatch.setenv("CXX", "false" if is_there else "no-such-compiler")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    caplog.set_level(logging.WARNING)
    torch._dynamo.reset()
    _compiled_fold.cache_clear()
    hidden, weight, targets, temperatures = large_inputs()
    for _ in range(2):
        values = token_logprobs(hidden, weight, targets, temperatures)
        torch.testing.assert_close(values, plain(hidden, weight, targets, temperatures), atol=1e-4, rtol=1e-4)
    [message] = caplog.messages
    assert ("no header" if is_there else "no-such-compiler") in message
    _compiled_fold.cache_clear()
