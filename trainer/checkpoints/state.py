"""What continues a training bit for bit: taken from its objects, and put back into them."""

from collections.abc import Mapping

import torch
from safetensors.torch import load, save

from trainer.checkpoints.snapshots import copies
from trainer.ema import MovingAverage
from trainer.errors import ResumeError
from trainer.model import Policy
from trainer.optim import Optimizer
from trainer.parallel import Ranks
from trainer.sharded import local_of, sharded_like

Parts = Mapping[str, Mapping[str, torch.Tensor]]


class TrainingState:
    """The trained weights, the optimizer's state, the weights' moving average where there is one, and the states of
    torch's random generators."""

    def __init__(self, policy: Policy, optimizer: Optimizer, average: MovingAverage | None, ranks: Ranks) -> None:
        self._policy, self._optimizer, self._average, self._ranks = policy, optimizer, average, ranks

    def seed(self, seed: int) -> None:
        """Begins the random generators of this rank, so that nothing depends on what a process does before."""
        torch.manual_seed(seed + self._ranks.rank)

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies in main memory, which the next step leaves alone; on other ranks than the main one nothing.
        Collective."""
        average = {} if self._average is None else self._average.tensors()
        return {
            "weights": copies(self._policy.named_parameters, self._ranks),
            "optimizer": self._optimizer.state_tensors(),
            "average": copies(average, self._ranks),
            "random": self._random_states(),
        }

    def restore(self, parts: Parts, *, seed: int) -> None:
        """Takes up what `parts` gave on the main rank of as many ranks. A checkpoint from a CPU has no state of a GPU's
        generator: that one begins as `seed` says. Raises `ResumeError`, and has changed nothing then, where those are
        other weights, or of fewer ranks."""
        random, rank = parts.get("random", {}), self._ranks.rank
        if f"rank_{rank}/cpu" not in random:
            ranks = sorted({name.partition("/")[0] for name in random})
            raise ResumeError(
                f"the checkpoint has the random states of {ranks}, and this is rank_{rank}; set gpus as it was"
            )
        if self._average is not None:
            _check_same(self._policy, parts.get("average", {}), "a moving average of other weights")
        restore_weights(self._policy, parts["weights"])
        self._optimizer.load_state_tensors(parts.get("optimizer", {}))
        if self._average is not None:
            self._average.load(parts["average"])
        self._restore_random(random, seed)

    def _restore_random(self, random: Mapping[str, torch.Tensor], seed: int) -> None:
        """From those of all ranks."""
        rank = self._ranks.rank
        torch.set_rng_state(random[f"rank_{rank}/cpu"])
        if self._policy.device.type == "cuda":
            of_gpu = random.get(f"rank_{rank}/cuda")
            if of_gpu is None:
                torch.cuda.manual_seed(seed + rank)
            else:
                torch.cuda.set_rng_state(of_gpu, self._policy.device)

    def _random_states(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._policy.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._policy.device)
        gathered = enumerate(self._ranks.gathered(save(states)))
        return {f"rank_{rank}/{key}": state for rank, data in gathered for key, state in load(data).items()}


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
