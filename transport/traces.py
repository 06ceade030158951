"""Traces: every rollout of a step token by token, in one Parquet file a step that pandas, DuckDB and datasets read.

The orchestrator writes `traces/step_000012.parquet` when batch 12 ships, and `traces/eval_000020.parquet` after an
evaluation of version 20. What only the trainer knows (`trainer_logprobs`, `entropy`, `masked`) it leaves in
`traces/trained/step_000012.rank_0.parquet`; the orchestrator merges that into the step's file when the step is done.
`traces/vocabulary.parquet` has the text of each token id.

Legend: `L` tokens of one row.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from grpo.transport.folders import write_atomic
from grpo.transport.records import Int32
from numpy.typing import NDArray

FOLDER = "traces"
VOCABULARY_FILE = "vocabulary.parquet"
ROW_GROUP_BYTES = 1 << 20
"""Approximate size of rows that are compressed together: one rollout can be read without all others of its step."""
MASKS: Final = ("", "token_low", "token_high", "sequence_low", "sequence_high", "geo_low", "geo_high")
"""Meanings of `masked`: why the trainer left a sampled token out of the policy loss; 0 where it did not."""

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
        ("failure", pa.string()),  # the error in words where the rollout failed
        ("reward", pa.float64()),
        ("rewards", pa.string()),  # JSON, by role
        ("players", pa.string()),  # JSON, by role: `{"name": "v5", "digest": "xxh3_128:…"}`; null where none was bound
        ("measures", pa.string()),  # JSON, by name
        ("accuracy", pa.float64()),
        ("advantage", pa.float64()),  # mean over sampled tokens
        ("num_tokens", pa.int32()),  # sampled
        ("max_log_ratio", pa.float32()),  # largest difference of trainer and server over sampled tokens, with its sign
        ("mean_entropy", pa.float32()),
        ("num_masked", pa.int32()),
        ("temperature", pa.float32()),
        ("stop_reason", pa.string()),
        ("hint", pa.string()),
        ("extras", pa.string()),  # JSON: what the episode says of the rollout
        ("key", pa.uint32()),  # of the row's tokens, by which the trainer's part is found
        ("fields", pa.string()),  # JSON: the example's fields other than its prompt, long texts cut
        ("messages", pa.string()),  # JSON: the conversation, answers and tools' results included
        ("token_ids", pa.list_(pa.int32())),  # [L]
        ("loss_mask", pa.list_(pa.bool_())),  # [L] what the policy sampled
        ("versions", pa.list_(pa.int32())),  # [L]
        ("logprobs", pa.list_(pa.float32())),  # [L] the server's; 0 where not sampled
        ("advantages", pa.list_(pa.float32())),  # [L]
        ("teacher_logprobs", pa.list_(pa.float32())),  # [L], null without a teacher
        ("trainer_logprobs", pa.list_(pa.float32())),  # [L], null until the step is done
        ("entropy", pa.list_(pa.float32())),  # [L] in nats, null until the step is done
        ("masked", pa.list_(pa.int8())),  # [L] index into MASKS, null until the step is done
    ]
)
TRAINED_SCHEMA = pa.schema(
    [
        ("rollout", pa.string()),  # of the whole tree, as in the batch
        ("key", pa.uint32()),
        ("trainer_logprobs", pa.list_(pa.float32())),  # of the sampled tokens alone, in their order, as those below
        ("entropy", pa.list_(pa.float32())),
        ("masked", pa.list_(pa.int8())),
    ]
)
"""The columns that a rank of the trainer leaves, a row for each sample of a step."""
TOKENS: Final = tuple(field.name for field in SCHEMA if pa.types.is_list(field.type))
"""The columns with a value for each token."""
_TRAINED: Final = tuple(TRAINED_SCHEMA.names[2:])
_FIGURES: Final = ("max_log_ratio", "mean_entropy", "num_masked")


def trace_path(run: Path, step: int, *, evaluation: bool = False) -> Path:
    """Returns the path of the trace of a step, or of the evaluation of a version."""
    return run / FOLDER / f"{'eval' if evaluation else 'step'}_{step:06d}.parquet"


def traced_steps(run: Path, *, evaluation: bool = False) -> list[int]:
    """Returns the steps, or evaluated versions, that have traces, ascending."""
    start, end = "eval_" if evaluation else "step_", ".parquet"
    try:
        names = os.listdir(run / FOLDER)  # noqa: PTH208 -- a long run has thousands, and paths take their time
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (name[len(start) : -len(end)] for name in names if name.startswith(start) and name.endswith(end))
    return sorted(int(number) for number in found if number.isdecimal())


def trained_path(run: Path, step: int, rank: int) -> Path:
    """Returns where a rank of the trainer leaves its part."""
    return run / FOLDER / "trained" / f"step_{step:06d}.rank_{rank}.parquet"


def left_trained(run: Path) -> list[int]:
    """Returns the steps of which a rank's part is still there, ascending."""
    names = (path.name for path in (run / FOLDER / "trained").glob("step_*.rank_*.parquet"))
    return sorted({int(name[5:].partition(".")[0]) for name in names})


def token_key(token_ids: Int32) -> int:
    """Returns a number for the tokens [L] of a row: rows of one rollout with the same number have the same tokens, and
    so the same log-probabilities."""
    return zlib.crc32(np.ascontiguousarray(token_ids, np.int32).tobytes())


def make_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Returns rows, given by column name, as a table; columns that a row lacks are null in it."""
    return pa.Table.from_arrays([_column([row.get(f.name) for row in rows], f.type) for f in schema], schema=schema)


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(kind):  # arrays of the column's own type are taken over whole
        dtype = kind.value_type.to_pandas_dtype()
        values = [None if value is None else np.asarray(value, dtype) for value in values]
    return pa.array(values, kind)


def merge_trained(run: Path, step: int, num_ranks: int) -> bool:
    """Adds the trainer's parts of a step to its trace and removes them; without a trace nobody wants them. Returns
    False where a part is not there yet."""
    path, parts = trace_path(run, step), [trained_path(run, step, rank) for rank in range(num_ranks)]
    if not all(part.exists() for part in parts):
        return False
    known: dict[tuple[str, int], Mapping[str, Any]] = {}
    if path.exists():
        for part in parts:
            columns = pq.read_table(part, schema=TRAINED_SCHEMA)
            arrays = zip(*(columns[name].to_numpy() for name in _TRAINED), strict=True)
            keys = zip(columns["rollout"].to_pylist(), columns["key"].to_pylist(), strict=True)
            known |= {key: dict(zip(_TRAINED, one, strict=True)) for key, one in zip(keys, arrays, strict=True)}
        table = pq.read_table(path, schema=SCHEMA)
        roots = [rollout.partition(".")[0] for rollout in table["rollout"].to_pylist()]
        rows = zip(
            zip(roots, table["key"].to_pylist(), strict=True),
            table["loss_mask"].to_numpy(),
            table["logprobs"].to_numpy(),
            strict=True,
        )
        added = [_spread(known.get(key), mask, logprobs) for key, mask, logprobs in rows]
        for name in (*_TRAINED, *_FIGURES):
            field, values = SCHEMA.field(name), [one.get(name) for one in added]
            table = table.set_column(table.schema.get_field_index(name), field, _column(values, field.type))
        write_table(table, path)
    for part in parts:
        part.unlink(missing_ok=True)
    return True


def _spread(
    trained: Mapping[str, NDArray[Any]] | None, mask: NDArray[Any] | None, logprobs: NDArray[Any] | None
) -> Mapping[str, Any]:
    """Returns the trainer's values on all tokens of a row, 0 where not sampled, and the figures of the whole row."""
    if trained is None or mask is None or logprobs is None or len(trained[_TRAINED[0]]) != np.count_nonzero(mask):
        return {}
    sampled = mask.astype(bool)
    spread: dict[str, Any] = {}
    for name, values in trained.items():
        spread[name] = np.zeros(len(sampled), values.dtype)
        spread[name][sampled] = values
    ratios = (spread["trainer_logprobs"] - logprobs)[sampled]
    return spread | {
        "max_log_ratio": float(ratios[np.abs(ratios).argmax()]),
        "mean_entropy": float(trained["entropy"].mean()),
        "num_masked": int(np.count_nonzero(trained["masked"])),
    }


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a Parquet file that appears whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, file = max(1, table.num_rows * ROW_GROUP_BYTES // max(1, table.nbytes)), pa.BufferOutputStream()
    # Hardly a log-probability comes twice: a dictionary of them takes longer and is larger.
    pq.write_table(table, file, compression="zstd", use_dictionary=False, row_group_size=max(16, rows))
    write_atomic(path, memoryview(file.getvalue()), durable=False)
