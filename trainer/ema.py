"""The exponential moving average of the trained weights, which may take their place for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from grpo.trainer.distributed import local_tensor

_CHUNK = 1 << 24
"""Elements that are exchanged at a time: the exchange needs no more memory than that."""


class MovingAverage:
    """average ← decay · average + (1 - decay) · weights, in float32, from the weights as they are at first.

    Sharded parameters have sharded averages. Nothing but the average is kept.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, decay: float) -> None:
        """Takes float32 `parameters`, which everything that is trained is; others could not hold the average."""
        assert all(p.dtype == torch.float32 for p in parameters.values())
        self._parameters, self._decay = dict(parameters), decay
        self.averages = {name: p.detach().clone() for name, p in parameters.items()}
        """Averages by the parameters' names."""

    def update(self) -> None:
        """Updates the average after an optimizer step."""
        for name, parameter in self._parameters.items():
            local_tensor(self.averages[name]).lerp_(local_tensor(parameter), 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the parameters hold the average within the block; afterwards they are what they were, bit for bit.

        The block must not begin or end between a forward pass and its backward pass: autograd would refuse that.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            pair = local_tensor(parameter).view(-1), local_tensor(self.averages[name]).view(-1)
            for one, other in zip(*(tensor.split(_CHUNK) for tensor in pair), strict=True):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)
