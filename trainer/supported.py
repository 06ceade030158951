"""Lists the base models that the trainer computes as a server does, because tests have compared them with transformers.

`docs/models.md` is made from these lists by `tools/models_table.py`.
"""

from typing import Any

from grpo.trainer.errors import ModelError

PACKED = frozenset(
    {
        *("apertus", "arcee", "bitnet", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma3_text"),
        *("gemma4_text", "glm", "glm4", "helium", "hunyuan_v1_dense", "llama", "ministral", "ministral3", "mistral"),
        *("olmo", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
    }
)
"""Model types whose layers are all full attention by transformers' attention interface: samples are packed."""

UNPACKED = frozenset({"bamba", "falcon_h1", "granitemoehybrid", "lfm2", "olmo_hybrid", "qwen3_5_text"})
"""Model types with recurrent or convolutional layers, whose state would go from one packed sample into the next: each
sample is a row of its own, and what they share is computed for each of them."""

LEFT_OUT = {"falcon_h1": frozenset({"out_proj"}), "glm4": frozenset({"gate_up_proj"})}
"""Linear layers, by model type, that `all-linear` leaves out. PEFT refuses `out_proj` of Falcon-H1, whose fused kernels
read its weight past an adapter; vLLM merges `gate_up_proj` of GLM-4 from two layers, and refuses an adapter for one."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts")
_SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def is_packed(config: Any, sequence_len: int) -> bool:
    """Returns whether samples of this model are packed (True) or each computed in a row of its own (False).

    Raises `ModelError`, which gives the reason, for a model that the trainer does not compute.
    """
    kind = config.model_type
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"{kind} is a model of more than text, whose part for text is a {text.model_type}, and the trainer trains "
            "language models alone; use a text checkpoint"
        )
    if any((getattr(config, key, None) or 1) > 1 for key in _NUM_EXPERTS):
        raise ModelError(
            f"{kind} is a mixture of experts, for which the trainer lacks router replay: without the server's choice "
            "of experts, log-probabilities of the two sides differ by whole experts; use a dense model"
        )
    if kind not in PACKED | UNPACKED:
        raise ModelError(
            f"no test has compared {kind} with transformers; the trainer takes models of the types "
            f"{', '.join(sorted(PACKED | UNPACKED))}"
        )
    if scaled := [key for key in _SCALED_LOGITS if getattr(config, key, None) not in (None, 1, 1.0)]:
        raise ModelError(f"this {kind} changes its logits by {', '.join(scaled)}, which the trainer does not compute")
    _check_long_rope(config, sequence_len)
    if kind in UNPACKED:
        return False
    types = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) if types is None else "sliding_attention" in types
    if slides and (window := getattr(config, "sliding_window", None)) is not None:
        check_window(window, sequence_len, kind)
    return True


def _check_long_rope(config: Any, sequence_len: int) -> None:
    """Raises `ModelError` where server and trainer would turn positions by different factors: vLLM takes the long ones
    for all sequences once it allows long ones, transformers for long sequences alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    short = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if rope.get("rope_type") == "longrope" and short is not None and sequence_len > short:
        raise ModelError(
            f"this {config.model_type} (rope_type longrope) has other position factors for sequences above {short} "
            f"tokens, which a server takes for the shorter ones too; set sequence_len (now {sequence_len}) and "
            f"max_model_len to at most {short}"
        )


def check_window(window: int, longest: int, who: str) -> None:
    """Raises `ModelError` for an attention window that is shorter than sequences of `longest` tokens."""
    if window < longest:
        raise ModelError(
            f"{who} attends within a sliding window of {window} tokens, which the trainer does not compute; set "
            f"sequence_len (now {longest}) to at most {window}"
        )
