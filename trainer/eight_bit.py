"""bitsandbytes' AdamW with 8-bit state, over what this rank holds of each parameter."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from trainer.errors import ModelError
from trainer.parallel import ONE, Ranks
from trainer.sharded import local_of

_MAPS = ("qmap1", "qmap2")
"""The 256 values that the codes stand for."""
_STATE = ("state1", "state2", "absmax1", "absmax2", *_MAPS)


class AdamW8bit:
    """AdamW whose moments are codes of 8 bits with a scale for each 256 values (arXiv:2110.02861); those of parameters
    with fewer than 4,096 values are float32.

    `paged` keeps them in memory that the GPU's driver moves out when the GPU runs full. Not yet run: needs a GPU.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        paged: bool,
        ranks: Ranks = ONE,
    ) -> None:
        if paged and any(p.device.type == "cpu" for p in parameters.values()):
            raise ModelError(
                "optimizer: adamw_8bit_paged pages its state out of a GPU's memory, and the trainer runs on a CPU; "
                "use adamw_8bit"
            )
        from bitsandbytes.optim.adamw import AdamW8bit as Adam
        from bitsandbytes.optim.adamw import PagedAdamW8bit as PagedAdam

        self._parameters, self._ranks = dict(parameters), ranks
        # Its kernels take plain tensors: views on the shards' memory. A rank may have nothing of a small parameter.
        shards = {name: local_of(parameter) for name, parameter in parameters.items()}
        self._local = {name: torch.nn.Parameter(shard) for name, shard in shards.items() if shard.numel()}
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": epsilon, "weight_decay": weight_decay}
        self._adam: Any = (PagedAdam if paged else Adam)(list(self._local.values()), **options)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Applies the gradients that there are."""
        for name, parameter in self._local.items():
            gradient = self._parameters[name].grad
            parameter.grad = None if gradient is None else local_of(gradient)
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of codes, scales, maps and number of steps by `rank_0/name/state1` and so on: what each rank holds of
        a parameter has codes of its own. On other ranks than the main one nothing. Collective."""
        kept: dict[str, torch.Tensor] = {}
        for name in self._parameters:
            for rank, data in enumerate(self._ranks.gathered(save(self._state(name)))):
                if self._ranks.is_main:
                    kept |= {f"rank_{rank}/{name}/{key}": tensor for key, tensor in load(data).items()}
        return kept

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        state = self._adam.state.get(self._local[name], {}) if name in self._local else {}
        tensors = {key: state[key].to("cpu", copy=True) for key in _STATE if key in state}
        return tensors | ({"step": torch.tensor(state["step"])} if state else {})

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes up what `state_tensors` gave for the same number of ranks."""
        for position, (name, parameter) in enumerate(self._local.items()):
            prefix = f"rank_{self._ranks.rank}/{name}/"
            if f"{prefix}step" not in tensors:
                continue
            self._adam.init_state(self._adam.param_groups[0], parameter, 0, position)  # in paged memory where due
            state = self._adam.state[parameter]
            state["step"] = int(tensors[f"{prefix}step"])
            for key in _STATE:
                if key in _MAPS and key in state:
                    state[key] = tensors[prefix + key].to(parameter.device)
                elif key in state:
                    state[key].copy_(tensors[prefix + key])
