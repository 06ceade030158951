"""The canary in bfloat16, where two right programs differ by rounding: none of them is refused, and each fault is."""

from collections.abc import Callable

import torch
from grpo.infer.canary import check_effect
from grpo.transport.errors import PolicyRefused
from grpo.transport.records import Canary
from torch import Tensor
from transformers import Qwen3ForCausalLM

from tests.infer.two_forwards import SERVER, TRAINER, Adapter, linears, logprobs, random_adapter, random_model

NUM_CANARIES, NUM_TOKENS = 2, 128
SIZES = (0.2, 0.2, 0.1, 0.05)
"""What right adapters change of each layer's output; 0.2 moves log-probabilities by about two nats."""


def without_layer(model: Qwen3ForCausalLM, adapter: Adapter) -> Adapter:
    middle = f"layers.{model.config.num_hidden_layers // 2}."
    return {name: factors for name, factors in adapter.items() if middle not in name}


def swapped(model: Qwen3ForCausalLM, adapter: Adapter) -> Adapter:
    """The factors A of queries and keys are exchanged, which have the same shape."""
    other = {"q_proj": "k_proj", "k_proj": "q_proj"}
    return {
        name: (adapter[name.replace(name[-6:], other.get(name[-6:], name[-6:]))][0], b)
        for name, (_, b) in adapter.items()
    }


FAULTS: dict[str, Callable[[Qwen3ForCausalLM, Adapter], Adapter]] = {
    "a wrong scale": lambda model, adapter: {name: (a, b / 2) for name, (a, b) in adapter.items()},
    "a missing layer": without_layer,
    "swapped q and k": swapped,
    "the base itself": lambda model, adapter: {},
    "another version": lambda model, adapter: random_adapter(model, seed=2, size=SIZES[0]),
}


NUM_LAYERS = 64
"""The more layers, the more rounding, and the less one of them changes."""


def test_of_two_right_programs_in_bfloat16_none_is_refused_and_of_wrong_ones_each() -> None:
    model = random_model(NUM_LAYERS)
    generator = torch.Generator().manual_seed(NUM_LAYERS)
    ids = torch.randint(2, model.config.vocab_size // 2, (NUM_CANARIES, NUM_TOKENS), generator=generator)
    trained_base, served_base = (logprobs(model, ids, side) for side in (TRAINER, SERVER))

    def reasons(trained: Tensor, served: Tensor, base: Tensor = served_base) -> list[str | None]:
        """Of the refusals of the canaries; None for one that is proved."""
        found: list[str | None] = []
        for place, tokens in enumerate(ids.tolist()):
            own, own_base = (tuple(one[place].tolist()) for one in (trained, trained_base))
            canary = Canary(
                version=1, token_ids=tokens, logprobs=own, base_logprobs=own_base, dtype="bfloat16", is_zero=False
            )
            scores = served[place].tolist(), base[place].tolist()
            try:
                check_effect(canary, *scores, dtype="bfloat16", device="cpu", tolerance=None)
                found.append(None)
            except PolicyRefused as refused:
                found.append(refused.reason)
        return found

    adapters = [random_adapter(model, seed=seed, size=size) for seed, size in enumerate(SIZES, start=1)]
    assert reasons(trained_base, served_base) == [None] * NUM_CANARIES
    for adapter in adapters:
        right = reasons(*(logprobs(model, ids, side, adapter) for side in (TRAINER, SERVER)))
        assert right == [None] * NUM_CANARIES
    trained = logprobs(model, ids, TRAINER, adapters[0])
    for fault, spoil in FAULTS.items():
        found = reasons(trained, logprobs(model, ids, SERVER, spoil(model, adapters[0])))
        expected = "not_applied" if fault == "the base itself" else "canary_mismatch"
        assert found == [expected] * NUM_CANARIES, fault
    with torch.no_grad():
        for layer in linears(model).values():
            scale = layer.weight.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
            layer.weight.copy_((layer.weight.float() / scale).to(torch.float8_e4m3fn).float() * scale)
    served, base = (logprobs(model, ids, SERVER, one) for one in (adapters[0], None))
    assert reasons(trained, served, base) == ["base_mismatch"] * NUM_CANARIES, "a server with FP8 weights"
