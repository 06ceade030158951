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


@pytest.mark.parametrize("part", ["average", "weights"])
def test_what_cannot_be_restored_whole_changes_nothing(policy: Policy, part: str) -> None:
    average = MovingAverage(policy.named_parameters, decay=0.5, ranks=ONE)
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters.items()}
    other = {name: parameter + 1 for name, parameter in before.items()}
    parts = {"weights": other, "average": other} | {part: dict(list(other.items())[1:])}
    with pytest.raises(ResumeError):
        state_of(policy, average).restore(parts)
    for held in (policy.named_parameters, average.tensors()):
        assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
