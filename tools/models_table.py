"""Prints the lists of docs/models.md: every model type that the trainer takes, by how it computes samples, and those
that vLLM's build for CPUs does not serve.

python -m tools.models_table
"""

from collections.abc import Iterable

from grpo.trainer.supported import PACKED, UNPACKED

NOT_SERVED: dict[tuple[str, ...], str] = {
    ("bamba", "diffllama"): "vLLM refuses: “Layer 0 does not dispatch through the Transformers attention interface”",
    ("apertus",): "the canary refuses: vLLM rounds parameters of its activation to bfloat16",
    ("olmo_hybrid",): "“module 'triton' has no attribute 'set_allocator'”",
    ("qwen3_5_text",): "it needs torchvision",
}
"""Types of which vLLM 0.32 for CPUs does not serve an adapter, as `python -m benchmarks.served_models` has found. All
others agreed with the trainer within 1e-5 nats, in float32 and with an adapter on all linear layers."""


def lists() -> str:
    """Returns the two lists as Markdown."""
    rows = [f"- packed: {_names(sorted(PACKED))}", f"- one sample per row: {_names(sorted(UNPACKED))}"]
    rows += ["", "vLLM's build for CPUs does not serve adapters of these:", ""]
    rows += [f"- {_names(kinds)}: {reason}" for kinds, reason in NOT_SERVED.items()]
    return "\n".join(rows)


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in kinds)


if __name__ == "__main__":
    print(lists())
