"""Traces: every rollout of a step token by token, in one Parquet file a step that pandas, DuckDB and datasets read.

The orchestrator writes `traces/step_000012.parquet` when batch 12 ships, and `traces/eval_000020.parquet` after an
evaluation of version 20. What only the trainer knows (`trainer_logprobs`, `entropy`, `masked`) it leaves in
`traces/trained/step_000012.rank_0.parquet`; the orchestrator merges that into the step's file when the step is done.
`traces/vocabulary.parquet` has the text of each token id.

Legend: `L` tokens of one row.
"""

import os
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = "traces"
VOCABULARY_FILE = "vocabulary.parquet"
ROW_GROUP_SIZE = 16
"""Rows that are compressed together: one rollout is read without the others of its step."""
MASKS: Final = ("", "token_low", "token_high", "sequence_low", "sequence_high", "geo_low", "geo_high")
"""What `masked` means: why the trainer left a sampled token out of the policy loss; 0 where it did not."""

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),  # the batch, or of an evaluation the version
        ("group", pa.int64()),
        ("rollout", pa.string()),  # id, `group/number`, with `.place` for each level of sub-episodes
        ("row", pa.int16()),  # place among the rollout's training rows; a conversation that branches has several
        ("env", pa.string()),
        ("example", pa.int64()),
        ("role", pa.string()),
        ("trained", pa.bool_()),
        ("drop_reason", pa.string()),  # why it was not trained
        ("reward", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),  # by role
        ("measures", pa.map_(pa.string(), pa.float64())),
        ("accuracy", pa.float64()),
        ("advantage", pa.float64()),  # mean over sampled tokens
        ("num_tokens", pa.int32()),  # sampled
        ("max_log_ratio", pa.float32()),  # largest difference of trainer and server over sampled tokens, with its sign
        ("mean_entropy", pa.float32()),
        ("num_masked", pa.int32()),
        ("temperature", pa.float32()),
        ("stop_reason", pa.string()),
        ("hint", pa.string()),
        ("pair", pa.string()),  # chosen or rejected, where the rollout's prompt has made a preference pair
        ("messages", pa.string()),  # JSON: the conversation, answers and tools' results included
        ("token_ids", pa.list_(pa.int32())),  # [L]
        ("loss_mask", pa.list_(pa.bool_())),  # [L] what the policy sampled
        ("versions", pa.list_(pa.int32())),  # [L]
        ("logprobs", pa.list_(pa.float32())),  # [L] the server's; 0 where not sampled
        ("advantages", pa.list_(pa.float32())),  # [L]
        ("trainer_logprobs", pa.list_(pa.float32())),  # [L], null until the step is done
        ("entropy", pa.list_(pa.float32())),  # [L] in nats, null until the step is done
        ("masked", pa.list_(pa.int8())),  # [L] index into MASKS, null until the step is done
    ]
)
TOKENS: Final = tuple(field.name for field in SCHEMA if pa.types.is_list(field.type))
"""The columns with a value for each token."""


def trace_path(run: Path, step: int, *, evaluation: bool = False) -> Path:
    """Where the trace of a step, or of the evaluation of a version, is."""
    return run / FOLDER / f"{'eval' if evaluation else 'step'}_{step:06d}.parquet"


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a Parquet file that appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_SIZE)
    temporary.replace(path)
