"""The model that is trained: loading, log-probabilities of packed tokens, the policy's weights as files.

Knows nothing of losses, steps or transports.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils.logging import disable_progress_bar

from trainer import attention, memory
from trainer.base import load_base, packs_samples
from trainer.batch import PackedTokens
from trainer.errors import ModelError
from trainer.fsdp import Shards, shard
from trainer.lm_head import logprobs_and_entropy, token_logprobs
from trainer.lora import pass_on_adapters, shut_for, with_adapters
from trainer.noise import hidden_norms
from trainer.parallel import ONE, Ranks, group_of_one
from trainer.quantization.linear import Quantization
from trainer.weights import AdapterWeights, FullWeights, Snapshot, peft_names, published_names
from transport.records import adapter_folders
from transport.shared_base.sharing import ImportedBase
from transport.weights.shards import Weight

log = logging.getLogger(__name__)
Output = Literal["hidden", "logprobs", "entropy", "differentiable entropy"]


class PackedModel(torch.nn.Module):
    """A causal model on packed tokens. Every use of its weights is in `forward`, or follows one, because only that
    gathers weights that are shared out."""

    def __init__(self, causal_lm: Any, *, num_adapters: int = 1, packed: bool = True) -> None:
        """Where not `packed`, every sample is a row of its own."""
        super().__init__()
        self.causal_lm, self.num_adapters, self._packed = causal_lm, num_adapters, packed

    def forward(self, tokens: PackedTokens, *, output: Output) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns at the tokens before the targets [K, H] final hidden states, or [K] log-probabilities of the targets,
        or those with the [K] entropies, which have a gradient with "differentiable entropy" only."""
        every_token = self._packed_states(tokens) if self._packed else self._row_states(tokens)
        hidden = every_token.index_select(0, tokens.before_targets)
        if output == "hidden":
            return hidden
        inputs = hidden, self.head, tokens.targets, tokens.temperatures
        if output == "logprobs":
            return token_logprobs(*inputs)
        return logprobs_and_entropy(*inputs, differentiable=output == "differentiable entropy")

    def _packed_states(self, tokens: PackedTokens) -> torch.Tensor:
        """[U, H] from one sequence of all samples."""
        output = self.causal_lm.base_model(
            input_ids=tokens.token_ids[None],
            position_ids=tokens.position_ids[None],
            use_cache=False,
            layout=tokens.layout,
            **self._adapter_mask(tokens.adapters, len(tokens.token_ids)),
        )
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def _row_states(self, tokens: PackedTokens) -> torch.Tensor:
        """[U, H] from batches of samples of similar length, padded on the right, where no real token sees it."""
        layout, states = tokens.layout, []
        sizes = [count * length for count, length in layout.buckets]
        for shape, slots in zip(layout.buckets, layout.slots.split(sizes), strict=True):
            adapters = None if tokens.adapters is None else tokens.adapters[slots]
            output = self.causal_lm.base_model(
                input_ids=tokens.token_ids[slots].view(shape),
                use_cache=False,
                **self._adapter_mask(adapters, len(slots)),
            )
            states.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(states).index_select(0, layout.slot_of)

    def _adapter_mask(self, adapters: torch.Tensor | None, num_tokens: int) -> dict[str, torch.Tensor]:
        """What layers with several adapters are told of each token's own; nothing with one adapter."""
        if self.num_adapters == 1:
            return {}
        if adapters is None:
            adapters = torch.zeros(num_tokens, dtype=torch.int64, device=self.head.device)
        return {"shut": shut_for(adapters, self.num_adapters)}

    @property
    def head(self) -> torch.Tensor:
        """[V, H] the LM head's weight."""
        weight: torch.Tensor = self.causal_lm.get_output_embeddings().weight
        return weight


class Policy:
    """A model and what of it is trained: an adapter or several, which start as zero, on a frozen base, or all weights.

    Where ranks share the weights out (`shards`), all of them must call every method but the properties, in the same
    order.
    """

    def __init__(
        self,
        model: PackedModel,
        weights: AdapterWeights | FullWeights,
        *,
        named_parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        dtype: torch.dtype,
        shards: Shards | None,
        adapters: tuple[str, ...] = (),
    ) -> None:
        """`dtype` is the type of computation; `named_parameters` are those that are trained; `adapters` are names,
        where there are several."""
        self._model, self._weights, self._shards = model, weights, shards
        self._causal_lm: Any = model.causal_lm
        self.device, self.dtype = device, dtype
        config = self._causal_lm.config
        self.vocab_size = int(config.vocab_size)
        self.special_ids = _special_ids(config)
        self.adapters = adapters
        """Their names, where there are several."""
        self.named_parameters = dict(named_parameters)
        self.parameters = list(self.named_parameters.values())

    @property
    def num_adapters(self) -> int:
        """How many there are to choose among; 1 also where all weights are trained."""
        return max(1, len(self.adapters))

    @property
    def base_bytes(self) -> int:
        """Of all that is not trained."""
        trained = {id(parameter) for parameter in self.parameters}
        held = (*self._model.parameters(), *self._model.buffers())
        return sum(tensor.nbytes for tensor in held if id(tensor) not in trained)

    @property
    def dtype_name(self) -> str:
        """`float32` or `bfloat16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def head(self) -> torch.Tensor:
        """[V, H] the LM head's weight. Where it is shared out, it is whole from a call of `hidden` to the backward pass
        after it, or to `forget_gathered`."""
        return self._model.head

    def logprobs(self, tokens: PackedTokens) -> torch.Tensor:
        """[K] float32 log-probabilities of the targets at their temperatures, with gradient to what is trained."""
        logprobs: torch.Tensor = self._model(tokens, output="logprobs")
        if not torch.is_grad_enabled():
            self.forget_gathered()
        return logprobs

    def logprobs_and_entropy(
        self, tokens: PackedTokens, *, differentiable: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[K] the same log-probabilities, and [K] float32 the entropy of each position's distribution in nats, with a
        gradient where it is `differentiable`."""
        output: Output = "differentiable entropy" if differentiable else "entropy"
        logprobs, entropy = self._model(tokens, output=output)
        return logprobs, entropy

    def hidden(self, tokens: PackedTokens) -> torch.Tensor:
        """[K, H] final hidden states at the tokens before the targets, with gradient to what is trained."""
        hidden: torch.Tensor = self._model(tokens, output="hidden")
        return hidden

    def begin_pass(self, *, last: bool) -> None:
        """To be called before each forward pass that is differentiated. After the `last` one's backward pass the
        gradients are those of all ranks together; further passes add to them."""
        if self._shards is not None:
            self._shards.begin_pass(last=last)

    def forget_gathered(self) -> None:
        """To be called after weights were changed between passes (an optimizer's step needs none: it follows a last
        pass). What ranks share out is then gathered again; otherwise it does nothing."""
        if self._shards is not None:
            self._shards.forget()

    def norms(self) -> dict[str, torch.nn.Module]:
        """The base's RMSNorms of the hidden state, by their names in its checkpoint. Raises `ModelError`."""
        return hidden_norms(self._causal_lm)

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within it, log-probabilities are those of the base. Where all weights are trained they are, until the first
        step; after it nothing gives them any more."""
        return self._weights.disabled() if isinstance(self._weights, AdapterWeights) else nullcontext()

    def is_base(self, version: int, *, adapter: int = 0) -> bool:
        """Whether the policy with this adapter, as `version`, is the base: the adapter changes nothing, or no step was
        made."""
        return self._weights.is_zero(adapter) if isinstance(self._weights, AdapterWeights) else version == 0

    def leave_out(self, adapters: Iterable[int]) -> None:
        """Takes the gradients of these adapters away, so that the optimizer's step leaves them, and what it remembers
        of them, as they are."""
        for adapter in adapters:
            for parameter in self._adapter.parameters(adapter):
                parameter.grad = None

    def snapshot(self) -> Snapshot:
        """What is trained, as it is now."""
        return self._weights.snapshot()

    def adapter_files(self, snapshot: Snapshot | None = None) -> dict[str, bytes]:
        """The adapter in PEFT's format, float32: name → bytes. Others than the first are in folders, as
        `transport.records.adapter_folders` says. Without a snapshot, as it is now."""
        return self._adapter.files(self.snapshot() if snapshot is None else snapshot)

    def merged_weights(self, snapshot: Snapshot) -> list[Weight]:
        """The base's matrices that the adapter changes, with it merged into them, in the base's type.

        Each is computed when it is read. They may be read beside a training step: the base does not change.
        """
        return self._adapter.merged(snapshot)

    def full_weights(self, snapshot: Snapshot) -> list[Weight]:
        """All weights in the type of computation, by the checkpoint's names."""
        assert isinstance(self._weights, FullWeights), "an adapter is trained"
        return self._weights.published(snapshot)

    @property
    def _adapter(self) -> AdapterWeights:
        assert isinstance(self._weights, AdapterWeights), "all weights are trained"
        return self._weights


def load_policy(
    folder: Path,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    rank: int,
    alpha: int,
    target_modules: tuple[str, ...],
    sequence_len: int,
    adapters: tuple[str, ...] = (),
    lora: bool = True,
    quantization: Quantization | None = None,
    imported: ImportedBase | None = None,
    gradient_checkpointing: bool = False,
    compile_layers: bool = False,
    attention_kernel: str | None = None,
    ranks: Ranks = ONE,
    zero_level: int = 1,
) -> Policy:
    """The base model in `folder` with a new adapter: A random from `seed`, B zero, both float32. With `lora` false the
    model itself, to be trained whole; `name`, `seed`, `rank`, `alpha` and `target_modules` say nothing then. With names
    of `adapters`, so many of them, in this order.

    `name` is what adapter_config.json calls the base, `dtype` the type of computation, `quantization` how an adapter's
    base is held (None: in `dtype`), `imported` the weights that a server shares, `attention_kernel` a kernel of
    `trainer.attention` (None: the best). Raises `ModelError` where the model cannot be trained so.

    Memory of P parameters that are all trained, in bytes without activations and the optimizer's state (8 P for
    AdamW's in float32). In float32 on one rank: 4 P for the weights, 4 P for their gradients. In bfloat16 on one rank:
    4 P for float32 weights, 2 P for what they are rounded to during a step, 4 P for gradients, which are summed in
    float32. With R ranks the first and the last are divided by R (gradients not at level 1), and level 3 gathers
    rounded weights layer by layer.
    """
    attention.register()
    disable_progress_bar()
    packed = packs_samples(folder, sequence_len)
    implementation = attention.implementation_for(device, dtype, forced=attention_kernel) if packed else "sdpa"
    base = load_base(
        folder,
        dtype=dtype if lora else torch.float32,
        attention=implementation,
        quantization=quantization,
        target_modules=target_modules if lora else (),
        device=device,
        imported=imported,
    )
    published = {} if lora else published_names(folder, base)
    names = peft_names(max(1, len(adapters)))
    kind: dict[str, Any] = {"rank": rank, "alpha": alpha, "target_modules": target_modules}
    peft = with_adapters(base, names, seed=seed, **kind) if lora else None
    model = PackedModel(base, num_adapters=len(names), packed=packed).eval()
    if compile_layers:
        memory.compile_layers(decoder_layers(base), device=device)
    if len(names) > 1:
        pass_on_adapters(decoder_layers(base))
    if gradient_checkpointing:
        memory.checkpoint_layers(decoder_layers(base))
    shards = _placed(model, lora=lora, device=device, dtype=dtype, ranks=ranks, zero_level=zero_level)
    # After they were shared out, which makes new ones.
    trained = {n: p for n, p in (base if peft is None else peft).named_parameters() if p.requires_grad}
    weights: AdapterWeights | FullWeights
    if peft is None:
        weights = FullWeights(trained, published=published, dtype=dtype, device=device, ranks=ranks)
    else:
        folders = dict(zip(adapter_folders(adapters), names, strict=True))
        weights = AdapterWeights(peft, folders=folders, name=name, ranks=ranks)
    policy = Policy(
        model,
        weights,
        named_parameters=trained,
        device=device,
        dtype=dtype,
        shards=shards,
        adapters=adapters,
    )
    counts = sum(p.numel() for p in policy.parameters), sum(p.numel() for p in model.parameters())
    log.info("%d of %d parameters are trained, %s, %s on %s", *counts, implementation, policy.dtype_name, device)
    return policy


def _placed(
    model: PackedModel, *, lora: bool, device: torch.device, dtype: torch.dtype, ranks: Ranks, zero_level: int
) -> Shards | None:
    """Brings the model to the device, shared out where there are several ranks, or where its float32 weights must be
    rounded to `dtype` to be computed with."""
    if ranks.size == 1 and (lora or dtype == torch.float32):
        model.to(device)
        return None
    group_of_one(device)
    level = zero_level if ranks.size > 1 else 2
    if lora and level < 3:
        model.to(device)  # FSDP2 moves what it shares out, layer by layer, and leaves the frozen base where it is
    layers = decoder_layers(model.causal_lm)
    return shard(model, layers, level=level, device=device, computation=None if lora else dtype)


def decoder_layers(causal_lm: Any) -> list[torch.nn.Module]:
    """The transformer's blocks, in their order. Raises `ModelError` where the model does not tell them."""
    layers = getattr(causal_lm.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ModelError(
            f"{causal_lm.config.model_type} has no list of layers, which ranks, gradient_checkpointing and compile need"
        )
    return list(layers)


def _special_ids(config: Any) -> frozenset[int]:
    ids: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, key, None)
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)
