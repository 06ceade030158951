"""Prints the table of docs/models.md: every model type that the trainer takes, and how it computes its samples.

python -m tools.models_table
"""

from grpo.trainer.supported import PACKED, UNPACKED
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def table() -> str:
    """Returns the table as Markdown."""
    rows = ["| `model_type` | class in transformers | samples |", "|---|---|---|"]
    for kind in sorted(PACKED | UNPACKED):
        how = "packed, shared prompts once" if kind in PACKED else "one a row"
        rows.append(f"| `{kind}` | `{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]}` | {how} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
