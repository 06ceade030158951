"""FSDP2 over the packed model: what the ranks share out, when it is gathered, and how gradients are summed.

Between two steps every rank has its part of what is trained, and of the optimizer's state. The levels are those of
ZeRO (arXiv:1910.02054), a step being several passes of forward and backward:

| level | weights that are gathered | gradients |
|---|---|---|
| 1 | once a step, and kept to the end of its last pass | whole on every rank, summed in the last pass |
| 2 | likewise | summed in every pass; a rank keeps its part |
| 3 | layer by layer, in every forward and again in every backward pass | as at level 2 |

An adapter's frozen base is whole on every rank at the levels 1 and 2, and shared out like the adapter at level 3.

On GPUs not yet run: needs them.

The losses have global normalisers already, so that gradients are summed over the ranks and not averaged. All ranks must
make the same passes in the same order. A rank whose process is alone uses level 2 without communicating.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Shards:
    """A model whose parameters are shared out among the ranks."""

    def __init__(self, model: torch.nn.Module, *, level: int) -> None:
        """`model` is what `shard` has been applied to."""
        self._parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._level = level
        for part in self._parts:
            # With a factor of 1, and sums only, nothing is ever divided.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def begin_pass(self, *, last: bool) -> None:
        """Says that the next backward pass is (not) the step's last. After the last one each parameter has in `grad`
        its part of the sum over all passes of all ranks."""
        for part in self._parts:
            part.set_requires_gradient_sync(last or self._level > 1, recurse=False)
            part.set_reshard_after_backward(last or self._level > 2, recurse=False)

    def forget(self) -> None:
        """Frees the gathered weights, so that the next pass gathers them as they are then. Gradients stay."""
        for part in self._parts:
            part.reshard()


def shard(
    model: torch.nn.Module,
    layers: Sequence[torch.nn.Module],
    *,
    level: int,
    device: torch.device,
    computation: torch.dtype | None,
) -> Shards:
    """Shares the parameters of `model` out among the processes of the default group, those of each of its `layers` in
    one message, and says when `model` is called.

    With `computation` all parameters are float32 and trained, and are gathered in that type; their gradients are summed
    in float32. Without, each keeps its type, and only float32 ones are trained: the levels 1 and 2 leave the frozen
    ones alone.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=computation, reduce_dtype=torch.float32, cast_forward_inputs=False)
    frozen = {p for p in model.parameters() if not p.requires_grad} if level < 3 else set()
    if not frozen:
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=level == 3)
    # Not after the forward pass: the LM head is needed in the losses too.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=frozen)
    return Shards(model, level=level)
