"""What a checkpoint restores, and what it refuses before anything has changed."""

from pathlib import Path

import pytest
import torch

from tests.trainer.models import tiny_policy
from trainer.checkpoints.state import TrainingState
from trainer.ema import MovingAverage
from trainer.errors import ResumeError
from trainer.model import Policy
from trainer.optim import Optimizer
from trainer.parallel import ONE


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    return tiny_policy(tiny_model)


def state_of(policy: Policy, average: MovingAverage | None = None) -> TrainingState:
    options = {"betas": (0.9, 0.99), "epsilon": 1e-8, "weight_decay": 0.0, "muon_momentum": 0.9, "max_grad_norm": 1.0}
    return TrainingState(policy, Optimizer(policy.named_parameters, kind="adamw", **options), average, ONE)  # type: ignore[arg-type]


@pytest.fixture
def gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Lets the policy say that it is on a GPU, and notes what that one's generator is given."""
    given: dict[str, object] = {}
    monkeypatch.setattr(policy, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: given.update(seed=seed))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: given.update(state=state))
    return given


def test_a_checkpoint_of_a_cpu_continues_on_a_gpu_whose_generator_begins_by_the_seed(
    policy: Policy, gpu: dict[str, object]
) -> None:
    torch.manual_seed(3)
    states = {"rank_0/cpu": torch.get_rng_state()}
    expected = torch.rand(4)
    weights = {name: parameter.detach() + 1 for name, parameter in policy.named_parameters.items()}
    state_of(policy).restore({"weights": weights, "random": states}, seed=7)
    assert gpu == {"seed": 7}
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.named_parameters.items())


def test_a_checkpoint_of_a_gpu_continues_its_generator(policy: Policy, gpu: dict[str, object]) -> None:
    state = torch.arange(16, dtype=torch.uint8)
    random = {"rank_0/cpu": torch.get_rng_state(), "rank_0/cuda": state}
    weights = {name: parameter.detach().clone() for name, parameter in policy.named_parameters.items()}
    state_of(policy).restore({"weights": weights, "random": random}, seed=7)
    assert gpu == {"state": state}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("random", r"has the random states of \['rank_1'\], and this is rank_0; set gpus as it was"),
        ("average", "has a moving average of other weights than are trained here: .* is missing in it"),
        ("weights", "has other weights than are trained here: .* is missing in it"),
    ],
)
def test_what_cannot_be_restored_whole_changes_nothing(policy: Policy, part: str, message: str) -> None:
    average = MovingAverage(policy.named_parameters, decay=0.5, ranks=ONE)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters.items()}
    other = {name: parameter + 1 for name, parameter in before.items()}
    parts = {"weights": other, "average": other, "random": {"rank_0/cpu": torch.get_rng_state()}}
    parts[part] = {"rank_1/cpu": torch.get_rng_state()} if part == "random" else dict(list(other.items())[1:])
    torch.manual_seed(99)
    generator = torch.get_rng_state()
    with pytest.raises(ResumeError, match=message):
        state_of(policy, average).restore(parts, seed=7)
    for held in (policy.named_parameters, average.tensors()):
        assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    assert torch.equal(torch.get_rng_state(), generator)
