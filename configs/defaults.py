"""Defaults of a run that follow from its device, its model and each other, where the person has not set them."""

from collections.abc import Callable
from typing import Any

from grpo.configs.facts import Hardware, ModelFacts
from grpo.configs.keys import drop, get, put
from grpo.configs.loading import Values

GIB = 2**30
SEQUENCE_LEN = {False: 2048, True: 8192}
"""Longest sample on a CPU and on a GPU."""
PROMPT_TOKENS = 1024
"""Tokens that are left for a prompt beside the longest answer, unless `buffer.max_prompt_length` says it."""
MICRO_BATCH_TOKENS = 16_384
"""Smallest micro-batch on a GPU: in shorter ones its kernels are over before the next are launched."""
SERVER_BYTES = 2 * GIB
"""Memory of a GPU that a server takes besides weights and cache: CUDA context, activations, graphs. Assumed, not
measured."""
_LENGTHS = {"sequence_len": ("train.sequence_len", "orch.seq_len"), "max_model_len": ("infer.max_model_len",)}


def fill(
    values: Values, hardware: Hardware, model: ModelFacts | None, *, is_preset: Callable[[str], bool]
) -> tuple[str, ...]:
    """Fills in types, lengths and micro-batches where `values` leaves them open, and returns lines that say what a
    length has raised. A person's length raises those of a preset. A server that does not fit into the memory is a
    problem of `values`.

    Args:
        hardware: Where trainer and server run.
        model: The base model (None: unknown, and so is what it allows).
        is_preset: Whether an origin of a value is a preset's file, whose values no person has set.
    """
    tree = values.tree
    on_gpu = hardware.on_gpu(get(tree, "train.device"))
    put(tree, "train.recipe", "bf16" if on_gpu else "fp32")
    put(tree, "infer.dtype", "float32" if get(tree, "train.recipe") == "fp32" else "bfloat16")
    longest = None if model is None or get(tree, "infer.rope_scaling") else model.positions
    answer = max((number(tree, f"orch.{key}.max_tokens") or 0 for key in ("sampling", "eval.sampling")), default=0)
    prompt = number(tree, "orch.buffer.max_prompt_length") or PROMPT_TOKENS
    if longest and answer >= longest:
        values.refuse("orch.sampling.max_tokens", f"leaves no room for a prompt: the model reads {longest:,} tokens")
        longest = None
    needed = min(answer + prompt, longest or answer + prompt) if answer else 0

    def opened(key: str) -> bool:
        """Whether the length is to be chosen here."""
        origins = [values.given[one][0] for one in _LENGTHS[key] if one in values.given]
        raises = not is_preset(values.given.get("orch.sampling.max_tokens", ("", ""))[0])
        too_short = needed > (number(tree, _LENGTHS[key][0]) or needed)
        return not origins or (raises and too_short and all(map(is_preset, origins)))

    chosen = {}
    if opened("sequence_len"):
        length = min(max(SEQUENCE_LEN[on_gpu], needed), longest or needed + SEQUENCE_LEN[True])
        while length > max(SEQUENCE_LEN[False], needed) and _too_large(tree, hardware, model, length):
            length //= 2
        chosen["sequence_len"] = max(length, needed)
    sequence_len = chosen.get("sequence_len") or number(tree, "train.sequence_len")
    if opened("max_model_len") and sequence_len is not None:
        is_set = "infer.max_model_len" in values.given
        reads = max(needed, sequence_len)
        chosen["max_model_len"] = needed if is_set else min(reads, longest or reads)
    raised = []
    for key, length in chosen.items():
        before = number(tree, _LENGTHS[key][0])
        for one in _LENGTHS[key]:
            drop(tree, one)
            put(tree, one, length)
            values.given.pop(one, None)
        if length > (before or SEQUENCE_LEN[on_gpu]):
            raised.append(f"{key} {length:,}")
    if sequence_len is not None:
        sequence_len = max(sequence_len, number(tree, "orch.seq_len") or 0)
        least = MICRO_BATCH_TOKENS if on_gpu else SEQUENCE_LEN[False] if "sequence_len" in chosen else 0
        for role in ("train", "orch"):
            put(tree, f"{role}.micro_batch_tokens", max(least, sequence_len))
    if (served := number(tree, "infer.max_model_len")) and (message := _too_large(tree, hardware, model, served)):
        key = "orch.sampling.max_tokens" if answer and "max_model_len" in chosen else "infer.max_model_len"
        values.refuse(key, message)
    told = f"{' and '.join(raised)} for answers of {answer:,} tokens to prompts of {needed - answer:,}"
    return (f"lengths: {told}",) if raised else ()


def number(tree: Any, key: str) -> int | None:
    """Returns a whole number above 0 of a tree whose values may be texts yet; None where there is none."""
    value = get(tree, key)
    text = "" if isinstance(value, bool) else str(value).replace("_", "")
    return int(text) if text.isdecimal() and int(text) else None


def _too_large(tree: Any, hardware: Hardware, model: ModelFacts | None, length: int) -> str | None:
    """Returns why the server cannot start with sequences of `length` tokens: weights and cache of one take more than
    the memory, of which the trainer has its base too where it shares the device. None where it may fit, or nothing is
    known of the memory or the model."""
    on_gpu = hardware.on_gpu(get(tree, "infer.device"))
    total = hardware.gpu_bytes if on_gpu else hardware.main_bytes
    if total is None or model is None:
        return None
    size, parts = (4 if get(tree, "infer.dtype") == "float32" else 2), (number(tree, "infer.tp") or 1)
    apart = on_gpu and (len(hardware.gpus) > 1 or get(tree, "train.sleep_mode") in (True, "true"))
    shared = get(tree, "train.colocate") in (True, "true")
    quantized = any(get(tree, f"train.qlora_{kind}") in (True, "true") for kind in ("bnb", "fp8", "fp4"))
    weights, cache = model.num_values * size / parts, model.cache_values * size * length / parts
    base = 0.0 if apart or shared else model.num_values * size * (0.3 if quantized else 1)
    besides = SERVER_BYTES if on_gpu else 0
    if (sum_of := weights + cache + base + besides) <= total:
        return None
    parts_of = [f"{gib(weights)} weights", f"{gib(cache)} cache of one sequence of {length:,} tokens"]
    parts_of += [f"{gib(base)} the trainer's base"] if base else []
    parts_of += [f"{gib(besides)} besides"] if besides else []
    where = "a GPU" if on_gpu else "this machine"
    remedy = "--colocate, qlora_bnb: true (trainer), a GPU each" if base and on_gpu else "a smaller model"
    return (
        f"needs {gib(sum_of)} where {where} has {gib(total)}: {', '.join(parts_of)}; use a shorter max_tokens "
        f"or max_model_len, {remedy}, or more memory"
    )


def gib(num_bytes: float) -> str:
    """Returns a size for people."""
    return f"{num_bytes / GIB:.2f} GiB"
