"""Prints the table of docs/models.md: every model type that the trainer takes, how it computes samples, and whether
vLLM's build for CPUs serves it.

python -m tools.models_table
"""

from grpo.trainer.supported import PACKED, UNPACKED
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_NO_WAY = "refused by vLLM: “Layer 0 does not dispatch through the Transformers attention interface”"
NOT_SERVED = {
    "apertus": "refused by the canary: vLLM rounds parameters of its activation to bfloat16",
    "bamba": _NO_WAY,
    "diffllama": _NO_WAY,
    "olmo_hybrid": "not on CPUs: “module 'triton' has no attribute 'set_allocator'”",
    "qwen3_5_text": "not without torchvision",
}
"""Types of which vLLM 0.32 for CPUs does not serve an adapter, as `python -m benchmarks.served_models` has found. All
others agreed with the trainer within 1e-5 nats, in float32 and with an adapter on all linear layers."""


def table() -> str:
    """Returns the table as Markdown."""
    rows = ["| `model_type` | class in transformers | samples | adapter served on a CPU |", "|---|---|---|---|"]
    for kind in sorted(PACKED | UNPACKED):
        how = "packed" if kind in PACKED else "one per row"
        rows.append(
            f"| `{kind}` | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}` | {how} | {NOT_SERVED.get(kind, 'yes')} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
