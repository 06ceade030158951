"""A loss of the user's own: `loss.import_path`."""

from pathlib import Path

import pytest
import torch
from grpo.configs.loading import load
from grpo.configs.loss import LossSettings
from grpo.configs.train import TrainSettings
from grpo.trainer.custom_loss import custom_loss, loss_function
from grpo.trainer.errors import LossError
from grpo.trainer.loss import policy_loss

from tests.trainer.bench import Bench, on_policy
from tests.trainer.models import as_floats, tiny_batch
from tests.trainer.test_loss import counts, tokens_of

PPO = """
import torch


def loss(tokens):
    ratio = torch.exp(tokens.logprobs - tokens.inference_logprobs)
    surrogate = torch.minimum(ratio * tokens.advantages, ratio.clamp(0.8, 1.28) * tokens.advantages)
    return -surrogate, {"surrogate": surrogate}
"""


def written(folder: Path, source: str, name: str = "my_loss.py") -> str:
    (folder / name).write_text(source)
    return f"{folder / name}:loss"


def test_ten_lines_of_dapo_have_its_gradients_and_their_own_metric(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(20, generator=generator)).requires_grad_()
    noise, advantages = torch.randn(2, 20, generator=generator)
    tokens = tokens_of(logprobs, [0] * 20, inference_logprobs=logprobs.detach() + 0.3 * noise, advantages=advantages)
    settings = LossSettings(import_path=written(tmp_path, PPO))
    ours, metrics = custom_loss(loss_function(str(settings.import_path)), tokens, settings, counts(40))
    theirs, _ = policy_loss(tokens, LossSettings(name="dapo"), counts(40))
    torch.testing.assert_close(*(torch.autograd.grad(one, logprobs)[0] for one in (ours, theirs)))
    found = as_floats(metrics)
    assert found["policy/custom_surrogate"] == pytest.approx(-2 * found["loss/policy"])  # / 20 and not / 40


def test_the_entropy_bonus_raises_the_entropy_with_a_loss_of_ones_own_too(tmp_path: Path) -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropies = torch.tensor([0.5, 0.25], requires_grad=True)
    settings = LossSettings(import_path=written(tmp_path, "def loss(tokens):\n    return -tokens.logprobs\n"))
    settings = settings.model_copy(update={"entropy_tau": 0.5})
    function = loss_function(str(settings.import_path))
    loss, _ = custom_loss(function, tokens_of(logprobs, [0, 0], entropies=entropies), settings, counts(4))
    gradients = torch.autograd.grad(loss, (logprobs, entropies))
    assert loss.item() == pytest.approx((1 + 2 - 0.5 * 0.75) / 4)
    assert [one.tolist() for one in gradients] == [[-0.25, -0.25], [-0.125, -0.125]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return -tokens.logprobs.sum()", r"shape \[\].*\[3\]"),
        ("return -tokens.logprobs.detach()", "without gradient"),
        ("return 0.5", "0.5"),
        ("return -tokens.logprobs, {'kl': 1.0}", "metric kl"),
        ("return -tokens.logprob", r"logprob.*my_loss.py, line 2"),
    ],
)
def test_a_loss_that_gives_something_else_is_an_error_that_says_what(tmp_path: Path, body: str, says: str) -> None:
    function = loss_function(written(tmp_path, f"def loss(tokens):\n    {body}\n"))
    tokens = tokens_of(torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), [0, 0, 1])
    with pytest.raises(LossError, match=says):
        custom_loss(function, tokens, LossSettings(), counts(3))


@pytest.mark.parametrize(
    ("source", "says"), [("x = 1", "has no loss"), ("loss = 1", "expected a function"), ("import nosuch", "nosuch")]
)
def test_a_path_that_leads_to_no_function_is_an_error(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(LossError, match=says):
        loss_function(written(tmp_path, source))


def test_a_file_beside_the_settings_trains_a_run(tiny_model: Path, tmp_path: Path) -> None:
    written(tmp_path, PPO)
    (tmp_path / "train.yaml").write_text(f"model: {tiny_model}\nloss: {{import_path: 'my_loss.py:loss'}}\n")
    loaded = load(TrainSettings, file=tmp_path / "train.yaml").settings
    assert loaded.loss.import_path == f"{tmp_path / 'my_loss.py'}:loss"
    bench = Bench(tiny_model, tmp_path, max_steps=1, loss=loaded.loss.model_dump(exclude_unset=True))
    bench.train(on_policy(tiny_batch((6, 9)), bench.policy))
    assert bench.metrics(1)["optim/grad_norm"] > 0
    assert "policy/custom_surrogate" in bench.metrics(1)
