"""Reads traces for the page: columns without tokens of a whole step, and single rollouts with them."""

import heapq
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grpo.run_files import read_file
from grpo.transport.records import NO_TEACHER_LOGPROB
from grpo.transport.traces import FOLDER, MASKS, SCHEMA, TOKENS, VOCABULARY_FILE, trace_path

_TEXTS = ("messages", "hint", "extras", "fields")
_JSON = ("rewards", "measures", "messages", "players", "fields", "extras")
_PER_ROLLOUT = [name for name in SCHEMA.names if name not in (*TOKENS, *_TEXTS, "players", "key", "step")]
_FLOATS = [name for name in _PER_ROLLOUT if pa.types.is_floating(SCHEMA.field(name).type)]
_SCORES = ["rollout", "row", "env", "example", "accuracy"]
_RIGHT = ("answer", "solution", "target", "expected", "label", "reference")
"""Names of fields that hold an example's right answer, the likeliest first."""
_MAX_TEXT = 2000
"""Characters of a prompt or an answer in a table."""
_MAX_TOKENS = 400
"""Tokens of an answer that are compared with those of another."""
_AROUND = 6
"""Tokens shown before and after one of the worst."""
_DECIMALS = 5
"""Decimal places of log-probabilities and the like; the fifth is below a server's rounding."""


def _open(run: Path, step: int, *, evaluation: bool) -> pq.ParquetFile | None:
    """None where there is no trace, or only one of another release."""
    path = trace_path(run, step, evaluation=evaluation)
    try:
        file = pq.ParquetFile(read_file(run, path))
    except (OSError, pa.ArrowException):
        return None
    return file if file.schema_arrow.equals(SCHEMA) else None


def rollouts_of(run: Path, step: int, *, evaluation: bool = False) -> list[dict[str, Any]]:
    """Returns one entry for each training row of a step, without tokens; none where there is no trace."""
    file = _open(run, step, evaluation=evaluation)
    if file is None:
        return []
    with file:
        rows: list[dict[str, Any]] = file.read(columns=_PER_ROLLOUT).to_pylist()
    for row in rows:
        for name in ("rewards", "measures"):
            row[name] = msgspec.Raw((row[name] or "{}").encode())
        for name in _FLOATS:
            row[name] = _finite(row[name])
    return rows


def scores_of(run: Path, version: int) -> list[dict[str, Any]]:
    """Returns of each row of an evaluation what pass@k is computed from; kept until its trace changes."""
    try:
        path = read_file(run, trace_path(run, version, evaluation=True))
        return _scores(run, version, path.stat().st_mtime_ns)
    except OSError:
        return []


@lru_cache(maxsize=1024)
def _scores(run: Path, version: int, _changed_ns: int) -> list[dict[str, Any]]:
    file = _open(run, version, evaluation=True)
    if file is None:
        return []
    with file:
        rows: list[dict[str, Any]] = file.read(columns=_SCORES).to_pylist()
    return rows


def texts_of(
    run: Path, step: int, ids: Collection[str] | None, *, evaluation: bool = False, tokens: bool = False
) -> dict[str, Any]:
    """Returns prompt, last answer and right answer of rollouts (None: of all), by id; with `tokens` the first sampled
    ones as texts. Of a service's datums, which have no messages, prompt and answer are their tokens as text."""
    file = _open(run, step, evaluation=evaluation)
    found: dict[str, Any] = {}
    if file is None:
        return found
    columns, texts, of_tokens = ["rollout", "row", "messages", "fields"], vocabulary(run), ["token_ids", "loss_mask"]
    with file:
        for index, places in _groups(file, lambda one: ids is None or one in ids):
            group = file.read_row_group(index, columns=columns + (of_tokens if tokens else []))
            rows = group.to_pylist()  # pyarrow's `take` would import pandas, which takes a second
            if not tokens and any(rows[place]["messages"] in (None, "[]") for place in places):
                known = file.read_row_group(index, columns=of_tokens).to_pylist()
                rows = [row | one for row, one in zip(rows, known, strict=True)]
            for row in (rows[place] for place in places):
                if row["row"]:  # further rows of the rollout
                    continue
                found[row["rollout"]] = one = _texts(row)
                if row["messages"] in (None, "[]") and row["token_ids"]:
                    one["prompt"], one["answer"] = map(_cut, _told_by_tokens(row, texts))
                if tokens and row["token_ids"] is not None:
                    sampled = [one for one, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask]
                    found[row["rollout"]]["tokens"] = [texts.get(one, "") for one in sampled[:_MAX_TOKENS]]
    return found


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    messages, fields = json.loads(row["messages"] or "[]"), json.loads(row["fields"] or "{}")
    answers = [place for place, one in enumerate(messages) if one.get("role") == "assistant"]
    asked = [one for one in messages[: answers[0] if answers else None] if one.get("role") != "system"]
    right = next((fields[name] for name in _RIGHT if name in fields), None)
    return {
        "prompt": _cut(asked[-1].get("content") if asked else None),
        "answer": _cut(messages[answers[-1]].get("content") if answers else None),
        "right": _cut(right),
        "equal": _is_equal(messages, answers, right),
        "turns": len(answers),
    }


def _told_by_tokens(row: Mapping[str, Any], texts: Mapping[int, str]) -> tuple[str, str]:
    """Returns what comes before the first token that is trained, and what is trained, as texts."""
    ids, mask = row["token_ids"], row["loss_mask"]
    first = mask.index(True) if True in mask else len(mask)
    trained = (one for one, kept in zip(ids, mask, strict=True) if kept)
    return "".join(texts.get(one, "") for one in ids[:first]), "".join(texts.get(one, "") for one in trained)


def _is_equal(messages: Sequence[Mapping[str, Any]], answers: Sequence[int], right: Any) -> bool:
    """Returns whether the last answer is the right one, word for word."""
    return (
        bool(answers) and right is not None and str(messages[answers[-1]].get("content")).strip() == str(right).strip()
    )


def _cut(content: Any) -> str | None:
    if content is None:
        return None
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def rollouts_with(run: Path, step: int, text: str, *, evaluation: bool = False) -> list[str]:
    """Returns the rollouts in whose conversation or example a text stands, upper and lower case alike."""
    file = _open(run, step, evaluation=evaluation)
    found: list[str] = []
    if file is None:
        return found
    wanted = msgspec.json.encode(text).decode()[1:-1]
    with file:
        for index in range(file.num_row_groups):
            group = file.read_row_group(index, columns=["rollout", "messages", "fields"])
            hits = [pc.match_substring(group[name], wanted, ignore_case=True) for name in ("messages", "fields")]
            found += group.filter(pc.or_kleene(*hits))["rollout"].to_pylist()
    return list(dict.fromkeys(found))


MEASURES = ("log-ratio", "surprise", "entropy", "teacher", "advantage")


def worst_tokens(run: Path, step: int, by: str, *, num: int = 60, evaluation: bool = False) -> list[dict[str, Any]]:
    """Returns the sampled tokens of a step with the largest absolute value of a measure, the largest first, with the
    texts around them."""
    file = _open(run, step, evaluation=evaluation)
    if file is None:
        return []
    best: list[tuple[float, int, dict[str, Any]]] = []
    number, texts = 0, vocabulary(run)
    names = [
        "token_ids",
        "loss_mask",
        "logprobs",
        *{"log-ratio": ["trainer_logprobs"], "entropy": ["entropy"]}.get(by, []),
    ]
    names += {"teacher": ["trainer_logprobs", "teacher_logprobs"], "advantage": ["advantages"]}.get(by, [])
    with file:
        for index in range(file.num_row_groups):
            group = file.read_row_group(index, columns=["rollout", "row", "reward", *names])
            plain = {name: group[name].to_pylist() for name in ("rollout", "row", "reward")}
            lists = {name: _lists(group[name]) for name in names}
            for place in range(group.num_rows):
                row = {name: values[place] for name, values in lists.items()}
                values = _measured(row, by)
                if values is None or not len(values):
                    continue
                size = np.abs(values)
                for at in np.argpartition(-size, min(num, len(size)) - 1)[:num]:
                    number += 1
                    if len(best) == num and size[at] <= best[0][0]:
                        continue
                    token = {name: values[place] for name, values in plain.items()}
                    token |= {"at": int(at), "value": float(values[at])} | _around(row["token_ids"], int(at), texts)
                    (heapq.heappush if len(best) < num else heapq.heapreplace)(best, (float(size[at]), number, token))
    return [token for size, _, token in sorted(best, key=lambda one: -one[0]) if size > 0]


def _lists(column: pa.ChunkedArray) -> list[NDArray[Any] | None]:
    """Returns each row's list as an array."""
    return [None if not one.is_valid else _numpy(one.values) for chunk in column.chunks for one in chunk]


def _numpy(array: pa.Array) -> NDArray[Any]:
    """Returns a column of numbers or truth values, none of them null. The array's own `to_numpy` would import
    pandas, for which the first page would wait a second."""
    data, begin, end = array.buffers()[1], array.offset, array.offset + len(array)
    if data is None:
        return np.empty(0)
    if pa.types.is_boolean(array.type):
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[begin:end].astype(bool)
    return np.frombuffer(data, array.type.to_pandas_dtype())[begin:end]


def _measured(row: Mapping[str, NDArray[Any] | None], by: str) -> NDArray[Any] | None:
    """Returns a measure of each token, 0 where it was not sampled; None without it."""
    mask, served = row["loss_mask"], row["logprobs"]
    trainer, teacher = row.get("trainer_logprobs"), row.get("teacher_logprobs")
    if mask is None or served is None:
        return None
    values = {"surprise": -served, "entropy": row.get("entropy"), "advantage": row.get("advantages")}.get(by)
    if by == "log-ratio" and trainer is not None:
        values = trainer - served
    if by == "teacher" and trainer is not None and teacher is not None:
        values = np.where(teacher >= NO_TEACHER_LOGPROB, 0, trainer - teacher)
    return None if values is None else np.nan_to_num(np.where(mask, values, 0))


def _around(ids: Any, at: int, texts: Mapping[int, str]) -> dict[str, Any]:
    def joined(begin: int, end: int) -> str:
        return "".join(texts.get(int(one)) or f"⟨{one}⟩" for one in ids[max(0, begin) : end])

    before, after = joined(at - _AROUND, at), joined(at + 1, at + 1 + _AROUND)
    return {"text": joined(at, at + 1), "before": before, "after": after}


def rollout(run: Path, step: int, rollout_id: str, *, evaluation: bool = False) -> list[dict[str, Any]]:
    """The rows of one rollout and of its sub-episodes, with tokens."""
    file = _open(run, step, evaluation=evaluation)
    if file is None:
        return []
    found = []
    with file:
        for index, places in _groups(file, lambda one: one == rollout_id or one.startswith(f"{rollout_id}.")):
            table = file.read_row_group(index)
            found += [_with_tokens(run, table.slice(place, 1)) for place in places]
    return found


def _groups(file: pq.ParquetFile, wanted: Callable[[str], bool]) -> Iterator[tuple[int, list[int]]]:
    """Yields the row groups that have rows of wanted rollouts, and their places in it."""
    ids = file.read(columns=["rollout"])["rollout"].to_pylist()
    begin = 0
    for index in range(file.num_row_groups):
        num_rows = file.metadata.row_group(index).num_rows
        places = [place for place, one in enumerate(ids[begin : begin + num_rows]) if wanted(one)]
        begin += num_rows
        if places:
            yield index, places


def _with_tokens(run: Path, row: pa.Table) -> dict[str, Any]:
    """Returns one row as JSON takes it: per-token columns as lists, texts of tokens beside them."""
    plain = _plain(row.select([name for name in row.column_names if name not in TOKENS]).to_pylist()[0])
    for name in TOKENS:
        column = row[name].combine_chunks()
        plain[name] = None if column.null_count else _rounded(_numpy(column.flatten()))
    texts = vocabulary(run)
    plain["tokens"] = [texts.get(token) for token in plain["token_ids"] or []]
    plain["mask_names"] = MASKS
    return plain


def _rounded(values: Any) -> list[Any]:
    if values.dtype.kind != "f":
        return list(values.tolist())
    return [number if np.isfinite(number) else None for number in values.astype(float).round(_DECIMALS).tolist()]


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON texts as what they say, and numbers that are not finite as null."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if name in _JSON:
            plain[name] = json.loads(value) if value else [] if name == "messages" else {}
        else:
            plain[name] = _finite(value) if isinstance(value, float) else value
    return plain


def _finite(number: float | None) -> float | None:
    return None if number is None or not np.isfinite(number) else number


def vocabulary(run: Path) -> Mapping[int, str]:
    """The text of each token id; empty where the run has not written it."""
    path = run / FOLDER / VOCABULARY_FILE
    try:
        return _vocabulary(read_file(run, path), path.stat().st_mtime_ns)
    except (OSError, pa.ArrowException):
        return {}


@lru_cache(maxsize=4)
def _vocabulary(path: Path, _changed_ns: int) -> dict[int, str]:
    with pq.ParquetFile(path) as file:  # `read_table` would import pandas, which takes a second
        table = file.read()
    return dict(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


def versions_of(run: Path, steps: Sequence[int], env: str, example: int, *, evaluation: bool) -> list[dict[str, Any]]:
    """The rollouts of one example in the traces of these steps, in their order, without tokens."""
    found = []
    for step in steps:
        if (file := _open(run, step, evaluation=evaluation)) is None:
            continue
        with file:
            keys = file.read(columns=["env", "example"]).to_pylist()
            hits = [place for place, key in enumerate(keys) if key == {"env": env, "example": example}]
            if hits:
                names = ["step", *_PER_ROLLOUT, "messages"]
                table = file.read(columns=names)
                found += [_plain(table.slice(place, 1).to_pylist()[0]) for place in hits]
    return found


def num_equal(run: Path, step: int) -> int:
    """Returns how many answers of a step are the right ones, word for word."""
    return sum(one["equal"] for one in texts_of(run, step, None).values())


def failures(run: Path, step: int) -> dict[str, tuple[int, str | None]]:
    """Returns how many rollouts of a step's trace were dropped for each reason, and the first one's error."""
    file = _open(run, step, evaluation=False)
    if file is None:
        return {}
    with file:
        rows = file.read(columns=["drop_reason", "failure", "row"])
    found: dict[str, tuple[int, str | None]] = {}
    for row in rows.filter(pc.is_valid(rows["drop_reason"])).to_pylist():
        if not row["row"]:
            num, failure = found.get(row["drop_reason"], (0, row["failure"]))
            found[row["drop_reason"]] = num + 1, failure
    return found
