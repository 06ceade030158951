"""The exponential moving average of the trained weights, which may take their place for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainer.parallel import Ranks
from trainer.sharded import local_of, sharded_like

_AT_ONCE = 1 << 24
"""Elements that are exchanged at a time: the exchange needs no more memory than that."""


class MovingAverage:
    """average ← decay · average + (1 - decay) · weights, in float32, from the weights as they are at first.

    Sharded parameters have sharded averages. Nothing but the average is kept. Raises ValueError for parameters that are
    not float32, which could not hold the average in their place.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, decay: float, ranks: Ranks) -> None:
        if others := sorted(name for name, p in parameters.items() if p.dtype != torch.float32):
            raise ValueError(f"the moving average is of float32 weights, and {others} are of other types")
        self._parameters, self._decay, self._ranks = dict(parameters), decay, ranks
        self._averages = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self) -> None:
        """Moves the average on, after an optimizer step."""
        for name, parameter in self._parameters.items():
            local_of(self._averages[name]).lerp_(local_of(parameter), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the parameters hold the average. Afterwards they are what they were, bit for bit.

        Between a forward pass and its backward pass it must be neither entered nor left: autograd would refuse the
        backward pass.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole average by the parameters' names, for a checkpoint. Collective; unsharded ones are not copied."""
        return {name: self._ranks.whole(average) for name, average in self._averages.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the average from what `tensors` gave. Raises ValueError where they are not of these parameters."""
        if tensors.keys() != self._averages.keys():
            missing = sorted(self._averages.keys() - tensors.keys())
            unknown = sorted(tensors.keys() - self._averages.keys())
            raise ValueError(f"a moving average lacks {missing} and has {unknown} that are not trained here")
        for name, average in self._averages.items():
            if tensors[name].shape != average.shape:
                received, expected = list(tensors[name].shape), list(average.shape)
                raise ValueError(f"the moving average of {name} has shape {received}, expected {expected}")
            local_of(average).copy_(local_of(sharded_like(tensors[name], average)))

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            _swap(local_of(parameter).view(-1), local_of(self._averages[name]).view(-1))


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """[N] each."""
    for start in range(0, len(one), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        kept = one[part].clone()
        one[part] = other[part]
        other[part] = kept
