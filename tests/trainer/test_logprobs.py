import math

import pytest
import torch

from trainer.logprobs import token_logprobs


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temps: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T / temps[:, None]).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def test_a_two_token_vocabulary_by_hand() -> None:
    # logits (2, 0) / temperature 2 = (1, 0): log p(0) = 1 - ln(e + 1)
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])
    logprob = token_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([2.0]))
    assert logprob.item() == pytest.approx(1 - math.log(math.e + 1))


@pytest.mark.parametrize("logits_at_once", [1, 23, 50, 1 << 20])
def test_values_and_gradients_equal_plain_autograd_whatever_the_chunks(logits_at_once: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator)
    targets = torch.randint(0, 11, (17,), generator=generator)
    temperatures = torch.rand(17, generator=generator) + 0.3
    grad = torch.randn(17, generator=generator)
    ours = token_logprobs(hidden, weight, targets, temperatures, logits_at_once=logits_at_once)
    theirs = plain(hidden, weight, targets, temperatures)
    torch.testing.assert_close(ours, theirs)
    (our_grad,) = torch.autograd.grad(ours, hidden, grad)
    (their_grad,) = torch.autograd.grad(theirs, hidden, grad)
    torch.testing.assert_close(our_grad, their_grad)


def test_the_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 3, generator=generator)
    weight, targets = torch.randn(5, 3, generator=generator), torch.tensor([0, 4, 2, 2])
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.7])
    variable = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad(token_logprobs(variable, weight, targets, temperatures).sum(), variable)
    for i, j in ((0, 0), (1, 2), (3, 1)):
        step = torch.zeros_like(hidden)
        step[i, j] = 1e-2
        ends = [plain((hidden + s).double(), weight.double(), targets, temperatures).sum() for s in (step, -step)]
        assert grad[i, j].item() == pytest.approx(((ends[0] - ends[1]) / 2e-2).item(), rel=1e-3, abs=1e-4)


def test_the_logits_of_all_positions_never_exist_at_once() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden = torch.randn(64, 4, requires_grad=True)
    weight, targets = torch.randn(100, 4), torch.zeros(64, dtype=torch.long)
    with Watch():
        token_logprobs(hidden, weight, targets, torch.ones(64), logits_at_once=800).sum().backward()
    assert largest <= 800


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(50, 8).bfloat16()
    targets = torch.tensor([1, 2, 3])
    logprobs = token_logprobs(hidden, weight, targets, torch.ones(3))
    expected = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)


def test_a_head_that_is_trained_is_refused_because_it_would_get_no_gradient() -> None:
    hidden, weight = torch.ones(1, 3), torch.ones(5, 3, requires_grad=True)
    with pytest.raises(ValueError, match="the LM head requires gradients, expected a frozen one"):
        token_logprobs(hidden, weight, torch.tensor([0]), torch.ones(1))
