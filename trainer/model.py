"""Loads the model that is trained, and computes log-probabilities of packed tokens.

Knows nothing of losses, steps or transports.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from grpo.configs.train import ALL_LINEAR, TrainSettings
from grpo.trainer import attention, memory
from grpo.trainer.colocate import model_on, while_exported
from grpo.trainer.distributed import ONE, Ranks, Shards, shard
from grpo.trainer.errors import ModelError
from grpo.trainer.lm_head import logprobs_and_entropy
from grpo.trainer.loading import CheckpointTensors, decoder_linears, filled_model, model_for_shards, seemingly_in_memory
from grpo.trainer.lora import adapter_mask, takes_adapter_mask, with_adapters
from grpo.trainer.norms import fuse_norms
from grpo.trainer.packing import PackedTokens
from grpo.trainer.quantization import check_setting, stored_in
from grpo.trainer.supported import LEFT_OUT, is_packed
from grpo.trainer.weights import AdapterWeights, FullWeights, peft_names, published_names
from grpo.trainer.witness import GradientWitness
from grpo.transport.records import Quantization, adapter_folders
from grpo.transport.shared_base import ImportedBase
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

log = logging.getLogger(__name__)
Output = Literal["hidden", "logprobs", "differentiable entropy"]


class PackedModel(torch.nn.Module):
    """A causal model on packed tokens. Its weights are only used in `forward`, or between it and the backward pass,
    because only `forward` gathers weights that are sharded."""

    def __init__(
        self,
        causal_lm: Any,
        *,
        device: torch.device,
        num_adapters: int = 1,
        packed: bool = True,
        fp32_head: bool = False,
    ) -> None:
        """Computes every sample in a row of its own unless `packed`. With `fp32_head` the LM head is computed in
        float32, for which a copy of its weight is made in every pass."""
        super().__init__()
        self.causal_lm, self.num_adapters = causal_lm, num_adapters
        self.witness = GradientWitness(device)
        self.packed, self._fp32_head = packed, fp32_head

    def forward(self, tokens: PackedTokens, *, output: Output) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns, at the tokens before the targets, [K, H] final hidden states, or [K] log-probabilities of the
        targets and [K] entropies, which have a gradient with "differentiable entropy" only."""
        every_token = self._packed_states(tokens) if self.packed else self._row_states(tokens)
        hidden, head = every_token.index_select(0, tokens.before_targets), self.head
        if self._fp32_head:
            hidden, head = hidden.float(), head.float()
        if output == "hidden":
            return hidden
        differentiable, parts = output == "differentiable entropy", tokens.parts or (tokens,)
        states = hidden.split([len(part.targets) for part in parts])
        found = [_scored(part, own, head, differentiable) for part, own in zip(parts, states, strict=True)]
        if len(found) == 1:
            return found[0]
        logprobs, entropies = (torch.cat(values) for values in zip(*found, strict=True))
        return logprobs, entropies

    def _packed_states(self, tokens: PackedTokens) -> torch.Tensor:
        """Returns [U, H] computed as one sequence of all samples."""
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
        """Returns [U, H] computed as batches of samples of similar length, padded on the right, where no real token
        sees it."""
        rows, states = tokens.layout.rows, []
        shapes = [(count, length) for count, length, _ in rows.shapes]
        slots_of = rows.queries.split([count * length for count, length in shapes])
        for shape, slots in zip(shapes, slots_of, strict=True):
            adapters = None if tokens.adapters is None else tokens.adapters[slots]
            output = self.causal_lm.base_model(
                input_ids=tokens.token_ids[slots].view(shape),
                use_cache=False,
                **self._adapter_mask(adapters, len(slots)),
            )
            states.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(states).index_select(0, rows.slot_of)

    def _adapter_mask(self, adapters: torch.Tensor | None, num_tokens: int) -> dict[str, torch.Tensor]:
        """Returns the mask that layers with several adapters get; nothing with one adapter."""
        if self.num_adapters == 1:
            return {}
        if adapters is None:
            adapters = torch.zeros(num_tokens, dtype=torch.int64, device=self.head.device)
        return {"adapter_mask": adapter_mask(adapters, self.num_adapters)}

    @property
    def head(self) -> torch.Tensor:
        """[V, H] the LM head's weight."""
        weight: torch.Tensor = self.causal_lm.get_output_embeddings().weight
        return weight


def _scored(
    tokens: PackedTokens, hidden: torch.Tensor, head: torch.Tensor, differentiable: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [K] log-probabilities and entropies of `hidden` [K, H]; those that samples share are computed once."""
    if tokens.distinct is None:
        return logprobs_and_entropy(hidden, head, tokens.targets, tokens.temperatures, differentiable=differentiable)
    first, same = tokens.distinct
    inputs = hidden.index_select(0, first), head, tokens.targets[first], tokens.temperatures[first]
    logprobs, entropies = logprobs_and_entropy(*inputs, differentiable=differentiable)
    return logprobs.index_select(0, same), entropies.index_select(0, same)


class Policy:
    """A model and its trained weights: an adapter or several, which start as zero, on a frozen base, or all weights.

    If it is sharded over the ranks (`shards`), all of them must call every method but the properties, in the same
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
        """`dtype` is the type of computation; `named_parameters` are those that are trained; `adapters` are the
        adapters' names if there are several."""
        self._model, self._shards = model, shards
        self.causal_lm: Any = model.causal_lm
        self.weights = weights
        """The trained weights, in the form that versions are made of."""
        self.device, self.dtype = device, dtype
        self.dtype_name = str(dtype).removeprefix("torch.")
        """`float32` or `bfloat16`."""
        self.vocab_size = int(self.causal_lm.config.vocab_size)
        self.adapters = adapters
        self.num_adapters = max(1, len(adapters))
        """How many adapters samples choose among; 1 also if all weights are trained."""
        self.named_parameters = dict(named_parameters)
        self.parameters = list(self.named_parameters.values())

    def beside(self, weights: AdapterWeights) -> "Policy":
        """Returns a policy with these weights on the same frozen base, of which one can compute at a time."""
        return Policy(
            self._model,
            weights,
            named_parameters=weights.named_parameters(),
            device=self.device,
            dtype=self.dtype,
            shards=self._shards,
        )

    @property
    def can_join(self) -> bool:
        """True if one pass can have packs of several parts (`grpo.trainer.packing.joined`)."""
        return self._model.packed

    @property
    def trains_adapters(self) -> bool:
        """True if the base is frozen."""
        return isinstance(self.weights, AdapterWeights)

    @property
    def base_bytes(self) -> int:
        """Size of all that is not trained."""
        trained = {id(parameter) for parameter in self.parameters}
        held = (*self._model.parameters(), *self._model.buffers())
        return sum(tensor.nbytes for tensor in held if id(tensor) not in trained)

    @property
    def head(self) -> torch.Tensor:
        """[V, H] the LM head's weight. If it is sharded, it is whole from a call of `hidden` to the backward pass after
        it, or to `reshard`."""
        return self._model.head

    def logprobs(self, tokens: PackedTokens) -> torch.Tensor:
        """Returns [K] float32 log-probabilities of the targets at their temperatures, with gradient to the trained
        weights."""
        logprobs, _ = self.logprobs_and_entropy(tokens)
        if not torch.is_grad_enabled():
            self.reshard()
        return logprobs

    def logprobs_and_entropy(
        self, tokens: PackedTokens, *, differentiable: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns [K] float32 log-probabilities as `logprobs` does, and [K] float32 the entropy of each position's
        distribution in nats, with a gradient if it is `differentiable`."""
        output: Output = "differentiable entropy" if differentiable else "logprobs"
        logprobs, entropy = self._model(tokens, output=output)
        return logprobs, entropy

    def hidden(self, tokens: PackedTokens) -> torch.Tensor:
        """Returns [K, H] final hidden states at the tokens before the targets, with gradient to the trained weights."""
        hidden: torch.Tensor = self._model(tokens, output="hidden")
        return hidden

    @property
    def witness(self) -> GradientWitness:
        """The witness of its gradients, for use after a forward pass. Each backward pass on every rank must include
        it."""
        return self._model.witness

    def sync_gradients(self, *, last: bool) -> None:
        """Must be called before each forward pass that is differentiated, with whether it is the step's last. After the
        last one's backward pass the gradients are summed over all ranks; further passes add to them."""
        if self._shards is not None:
            self._shards.sync_gradients(last=last)

    def reshard(self) -> None:
        """Makes the next pass gather sharded weights again. Needed after they were changed between passes, but not
        after an optimizer's step, which follows a last pass."""
        if self._shards is not None:
            self._shards.reshard()

    def leave_out(self, adapters: Iterable[int]) -> None:
        """Removes the gradients of these adapters, so that the optimizer's step changes neither them nor its state for
        them."""
        assert isinstance(self.weights, AdapterWeights)
        for adapter in adapters:
            for parameter in self.weights.parameters(adapter):
                parameter.grad = None


def load_policy(
    settings: TrainSettings,
    folder: Path,
    device: torch.device,
    ranks: Ranks = ONE,
    *,
    imported: ImportedBase | None = None,
    checkpointing: memory.ActivationCheckpointing | None = None,
    attention_kernel: str | None = None,
) -> Policy:
    """Returns the base model in `folder` as the settings say: with a new adapter or several, A random from the seed, B
    zero, both float32; or, with `lora: false`, the model itself, all of whose weights are trained.

    `imported` are the weights that a server shares, `checkpointing` what layers keep for the backward pass (None: the
    first of `checkpointing_kinds`), `attention_kernel` a kernel of `grpo.trainer.attention` (None: the best). Raises
    `ModelError` if the model cannot be trained so, and `ExporterGone` if the server has ended meanwhile. Collective.

    Memory of P parameters that are all trained, in bytes without activations and the optimizer's state (8 P for
    AdamW's in float32). In float32 on one rank: 4 P for the weights, 4 P for their gradients. In bfloat16 on one rank:
    4 P for float32 weights, 2 P for what they are rounded to during a step, 4 P for gradients, which are summed in
    float32. With R ranks the first and the last are divided by R (gradients not at level 1), and level 3 gathers
    rounded weights layer by layer.
    """
    attention.register()
    disable_progress_bar()
    with while_exported(imported):
        return _loaded(settings, folder, device, ranks, imported, checkpointing, attention_kernel)


def _loaded(
    settings: TrainSettings,
    folder: Path,
    device: torch.device,
    ranks: Ranks,
    imported: ImportedBase | None,
    checkpointing: memory.ActivationCheckpointing | None,
    attention_kernel: str | None,
) -> Policy:
    lora, dtype, adapters = settings.lora, getattr(torch, settings.dtype), settings.lora_adapters
    sharded = ranks.size > 1 or settings.offload or (not lora and dtype != torch.float32)
    level = settings.zero_level if ranks.size > 1 else 2
    # FSDP2 moves what it shards to the device, layer by layer: a model that only shards can hold need never be whole.
    first = torch.device("cpu") if sharded and (level == 3 or not lora) else device
    if checkpointing is None:
        checkpointing = memory.checkpointing_kinds(settings, device)[0]
    with _loading(folder):
        packed = is_packed(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False), settings.sequence_len
        )
        implementation = attention.implementation_for(device, dtype, forced=attention_kernel) if packed else "sdpa"
        quantization = settings.quantization if imported is None else None
        stored = dtype if lora else torch.float32
        base: Any = None
        fill: Callable[[], None] | None = None
        if sharded and (level == 3 or not lora) and imported is None and quantization is None:
            check_setting(folder, stored_in(folder), None)
            kept_on = first if settings.offload else device
            for_shards = model_for_shards(folder, dtype=stored, attention=implementation, device=kept_on)
            base, fill = for_shards or (None, None)
        if base is None:
            base = _load_base(folder, stored, implementation, quantization, imported, first)
    _check_base(base)
    targets = target_modules(base, settings.lora_target_modules) if lora else ()
    published = {} if lora else published_names(folder, base)
    names = peft_names(max(1, len(adapters)))
    with seemingly_in_memory(base):
        peft = with_adapters(base, names, targets, settings) if lora else None
    compiled = memory.compiles(settings, device)
    if lora and not (sharded or compiled) and device.type == "cpu":
        fuse_norms(base, dtype)
    model = PackedModel(
        base,
        device=first if sharded else device,
        num_adapters=len(names),
        packed=packed,
        fp32_head=settings.fp32_lm_head,
    ).eval()
    layers: list[torch.nn.Module] = list(base.base_model.layers)
    memory.prepare_layers(
        layers,
        checkpointing,
        compile_layers=compiled,
        in_graph=implementation == attention.VARLEN and quantization is None,
        device=device,
        wrap=takes_adapter_mask if len(names) > 1 else None,
    )
    shards = None
    if sharded:
        kept = None if lora else dtype
        shards = shard(
            model,
            layers,
            in_float32=model.witness,
            level=level,
            device=device,
            computation=kept,
            offload=settings.offload,
        )
    if fill is not None:
        with _loading(folder):
            fill()
        model.load_state_dict({}, strict=False)  # by which FSDP takes notice of its new shards
    # After sharding, which makes new parameters.
    trained = {n: p for n, p in (peft or base).named_parameters() if p.requires_grad}
    weights: AdapterWeights | FullWeights
    if peft is None:
        weights = FullWeights(trained, published=published, dtype=dtype, ranks=ranks)
    else:
        folders = dict(zip(adapter_folders(adapters), names, strict=True))
        weights = AdapterWeights(peft, folders=folders, name=settings.model, ranks=ranks)
    policy = Policy(
        model, weights, named_parameters=trained, device=device, dtype=dtype, shards=shards, adapters=adapters
    )
    counts = sum(p.numel() for p in policy.parameters), sum(p.numel() for p in base.parameters())
    log.info("%d of %d parameters are trained, %s, %s on %s", *counts, implementation, policy.dtype_name, device)
    return policy


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"the base model in {folder} cannot be loaded: {error}") from error


def _load_base(
    folder: Path,
    dtype: torch.dtype,
    implementation: str,
    quantization: Quantization | None,
    imported: ImportedBase | None,
    device: torch.device,
) -> Any:
    """Returns the causal language model on `device`, computing in `dtype`: plain, quantized, or on imported weights."""
    stored = stored_in(folder)
    check_setting(folder, stored, quantization)
    if imported is not None:
        return model_on(folder, imported, dtype=dtype, attention=implementation)
    if quantization is not None:
        tensors = CheckpointTensors(folder, device=device, dtype=dtype)
        return filled_model(tensors, attention=implementation, stored=stored, format=quantization)
    # Straight to the device: main memory need not hold the model.
    place = None if device.type == "cpu" else device
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=implementation,
        local_files_only=True,
        device_map=place,
        trust_remote_code=False,
    )


def target_modules(base: Any, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the sorted names of the linear layers that get an adapter: those that were asked for, or for `all-linear`
    all in the decoder's layers but for `LEFT_OUT`. Raises `ModelError` for names that these layers do not have."""
    inside = {id(module) for layer in base.base_model.layers for module in layer.modules()}
    names = [name for name in decoder_linears(base) if id(base.get_submodule(name)) in inside]
    known = {name.rpartition(".")[2] for name in names}
    if missing := sorted(set(asked) - known - {ALL_LINEAR}):
        raise ModelError(
            f"lora_target_modules {', '.join(missing)}: this {base.config.model_type} has no linear layers of that "
            f"name; it has {', '.join(sorted(known))} (all of them: {ALL_LINEAR})"
        )
    return tuple(sorted(known - LEFT_OUT.get(base.config.model_type, set()) if ALL_LINEAR in asked else asked))


def _check_base(base: Any) -> None:
    """Raises `ModelError` for models that the packed forward pass would silently compute differently from the
    server."""
    if getattr(base.get_output_embeddings(), "bias", None) is not None:
        raise ModelError(f"the LM head of this {base.config.model_type} has a bias, which the trainer does not compute")
