"""What continues a training bit for bit: taken from its objects, and put back into them."""

from collections.abc import Mapping

import torch

from trainer.checkpoints.snapshots import copies
from trainer.ema import MovingAverage
from trainer.errors import ResumeError
from trainer.model import Policy
from trainer.optim import Optimizer
from trainer.parallel import Ranks
from trainer.sharded import local_of, sharded_like

Parts = Mapping[str, Mapping[str, torch.Tensor]]


class TrainingState:
    """The trained weights, the optimizer's state, and the weights' moving average where there is one. Nothing that
    training does is random."""

    def __init__(self, policy: Policy, optimizer: Optimizer, average: MovingAverage | None, ranks: Ranks) -> None:
        self._policy, self._optimizer, self._average, self._ranks = policy, optimizer, average, ranks

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies in main memory, which the next step leaves alone; on other ranks than the main one nothing.
        Collective."""
        average = {} if self._average is None else self._average.tensors()
        return {
            "weights": copies(self._policy.named_parameters, self._ranks),
            "optimizer": self._optimizer.state_tensors(),
            "average": copies(average, self._ranks),
        }

    def restore(self, parts: Parts) -> None:
        """Takes up what `parts` gave on the main rank of any number of ranks. Raises `ResumeError`, and has changed no
        weight then, where those are other weights, or an optimizer's state that belongs to another number of ranks."""
        if self._average is not None:
            _check_same(self._policy, parts.get("average", {}), "a moving average of other weights")
        _check_same(self._policy, parts["weights"], "other weights")
        self._optimizer.load_state_tensors(parts.get("optimizer", {}))
        restore_weights(self._policy, parts["weights"])
        if self._average is not None:
            self._average.load(parts["average"])


@torch.no_grad()
def restore_weights(policy: Policy, weights: Mapping[str, torch.Tensor]) -> None:
    """Takes up the trained weights alone, whole and by name. Raises `ResumeError`, and has changed nothing then, where
    they are others."""
    _check_same(policy, weights, "other weights")
    for name, parameter in policy.named_parameters.items():
        local_of(parameter).copy_(local_of(sharded_like(weights[name], parameter)))
    policy.forget_gathered()


def _check_same(policy: Policy, tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises `ResumeError` unless `tensors` have the names and shapes of what is trained."""
    own = {name: tuple(parameter.shape) for name, parameter in policy.named_parameters.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if different := sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name)):
        name = different[0]
        raise ResumeError(
            f"the checkpoint has {what} than are trained here: {name} is {saved.get(name, 'missing')} in it and "
            f"{own.get(name, 'missing')} here (and {len(different) - 1} more differ); use the release of grpo and of "
            "its libraries with which it was written"
        )
