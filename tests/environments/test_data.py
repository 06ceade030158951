"""The built-in `dataset`: files, folders and data sets of the Hub, and every way in which data can be wrong."""

import csv
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from grpo.environments.data import files
from grpo.environments.data.dataset import MAX_CHARS, Dataset
from grpo.transport.errors import UserError

from tests.grpo.run_folder import grpo
from tests.orchestrator.rollouts.contexts import score_of

Rows = Sequence[Mapping[str, Any]]


def sums(num: int) -> list[dict[str, Any]]:
    return [{"sum": f"{n}+1", "result": str(n + 1)} for n in range(num)]


def write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]], delimiter="," if path.suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def made(path: str, **args: Any) -> Dataset:
    return Dataset(**{"path": path, "prompt": "{sum}=", "answer": "result", "reward": "number", **args})


def prompts(environment: Dataset, split: str) -> list[str]:
    return [example["prompt"] for example in environment.dataset(split)]


# --- where rows come from ---


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_examples(tmp_path: Path, suffix: str) -> None:
    environment = made(write(tmp_path / f"data.{suffix}", sums(40)))
    examples = [*environment.dataset("train"), *environment.dataset("eval")]
    expected = [{"prompt": f"{one['sum']}=", "answer": one["result"], **one} for one in sums(40)]
    assert sorted(examples, key=str) == sorted(expected, key=str)


def test_a_split_by_fraction_follows_content_and_seed_and_stays_where_rows_are_added(tmp_path: Path) -> None:
    path = write(tmp_path / "data.csv", sums(500))
    environment = made(path, eval_fraction=0.2)
    train, held_out = (set(prompts(environment, split)) for split in ("train", "eval"))
    assert (len(train & held_out), len(train) + len(held_out)) == (0, 500)
    assert 70 <= len(held_out) <= 130  # 100 ± 3.4 standard deviations of √(500 · 0.2 · 0.8)
    longer = made(write(tmp_path / "longer.csv", sums(600)[::-1]), eval_fraction=0.2)
    assert held_out <= set(prompts(longer, "eval"))
    assert held_out != set(prompts(made(path, eval_fraction=0.2, seed=1), "eval"))
    with pytest.raises(ValueError, match="eval_fraction"):
        made(path, eval_fraction=1e-9).dataset("eval")


def test_another_file_is_evaluated_on_and_what_it_asks_is_not_trained_on(tmp_path: Path) -> None:
    path, held_out = write(tmp_path / "data.csv", sums(20)), write(tmp_path / "eval.jsonl", sums(3))
    environment = made(path, eval_path=held_out)
    assert prompts(environment, "eval") == ["0+1=", "1+1=", "2+1="]
    assert prompts(environment, "train") == [f"{n}+1=" for n in range(3, 20)]
    assert [row.place for row in environment.loaded.duplicates] == [f"{path}:{line}" for line in (2, 3, 4)]


def test_a_folder_has_splits_by_the_names_of_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train-00000-of-00002.parquet", sums(4))
    write(tmp_path / "a" / "train-00001-of-00002.parquet", sums(8)[4:])
    write(tmp_path / "a" / "test-00000-of-00001.parquet", sums(10)[8:])
    environment = made(str(tmp_path / "a"), eval_split="test")
    assert (len(environment.dataset("train")), prompts(environment, "eval")) == (8, ["8+1=", "9+1="])
    for split, rows in (("train", sums(4)), ("validation", sums(6)[4:])):  # as `save_to_disk` of `datasets` has it
        write(tmp_path / "b" / split / "data-00000-of-00001.arrow", rows)
    (tmp_path / "b" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    assert prompts(made(str(tmp_path / "b"), eval_split="validation"), "eval") == ["4+1=", "5+1="]


async def test_gsm8k_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"Two and {n}?", "answer": f"2 + {n} = <<2+{n}={n + 2}>>\n#### {n + 2},000"} for n in range(3)]
    files = {
        "main/train-00000.parquet": rows[:2],
        "main/test-00000.parquet": rows[2:],
        "socratic/train-0.parquet": rows,
    }
    folder, commit = tmp_path / "hub/datasets--openai--gsm8k", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for path, of_file in files.items():
        write(folder / "snapshots" / commit / path, of_file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    environment = Dataset(path="openai/gsm8k")
    assert [example["answer"] for example in environment.dataset("train")] == ["2,000", "3,000"]
    [example] = environment.dataset("eval")
    assert example["prompt"].startswith("Two and 2?\n\n")
    assert (await score_of(environment.rubric, "So it is 4000.", example)).reward == 1.0
    assert (await score_of(environment.rubric, "So it is 4.", example)).reward == 0.0
    assert len(Dataset(path="openai/gsm8k", eval_fraction=0.5).loaded.examples["train"]) < 2


# --- what an answer is worth ---


@pytest.mark.parametrize(
    ("reward", "completion", "worth"),
    [
        ("exact", " 7 ", 1.0),
        ("number", "It is 7.0", 1.0),
        ("math", r"\boxed{14/2}", 1.0),
        ({"regex": r"Answer: (\d+)"}, "Answer: 6, no, Answer: 7", 1.0),
        ({"judge": {"mock": ["It is.\nVerdict: right"]}}, "seven", 1.0),
        ({"judge": {"mock": ["Who knows"]}}, "eight", 0.0),
        ({"regex": r"\bseven\b"}, "It is seven.", 1.0),
    ],
)
async def test_rewards_by_name(tmp_path: Path, reward: Any, completion: str, worth: float) -> None:
    path = write(tmp_path / "data.csv", [{"sum": f"3+4{' ' * n}", "result": "7"} for n in range(30)])
    environment = made(path, reward=reward)
    assert (await score_of(environment.rubric, completion, environment.dataset("train")[0])).reward == worth


@pytest.mark.parametrize(
    ("parser", "completion", "worth"),
    [
        ("thinking", "<think>8?</think> 7", 1.0),
        ("thinking", "<think>3 + 4 = 7", 0.0),
        ("text", "<think>3 + 4 = 7", 1.0),
        ("boxed", r"\boxed{7}, not 8", 1.0),
        ({"marker": "####"}, "#### 7\nor 8", 1.0),
        ({"xml": "answer"}, "<answer>7</answer> 8", 1.0),
        ({"xml": ["reasoning", "answer"]}, "7", 0.0),
    ],
)
async def test_parsers_by_name(tmp_path: Path, parser: Any, completion: str, worth: float) -> None:
    environment = made(write(tmp_path / "data.csv", sums(30)), reward="number", parser=parser)
    example = environment.dataset("train")[0] | {"answer": "7"}
    assert (await score_of(environment.rubric, completion, example)).reward == worth


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"parser": "box"}, "box"),
        ({"parser": "marker"}, "needs an option"),
        ({"parser": {"boxed": 1}}, "takes no option"),
        ({"parser": {"xml": "a b"}}, "names"),
        ({"reward": "maths"}, "maths"),
        ({"reward": {"regex": "("}}, "regular expression"),
        ({"eval_split": "test", "eval_fraction": 0.5}, "one of them"),
        ({"reward": {"regex": r"(\d)"}, "answer": None}, "no column 'answer'"),
        ({"reward": "unit_tests", "answer": None, "answer_after": "#"}, "answer_after"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, args: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "data.csv", sums(3))
    with pytest.raises(ValueError, match=told):
        made(path, **args)


# --- bad data ---


def of_file(name: str, content: bytes | str) -> Any:
    def write_it(folder: Path) -> str:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return str(folder / name)

    return write_it


def of_rows(*rows: Any, suffix: str = "jsonl") -> Any:
    return lambda folder: write(folder / f"data.{suffix}", rows)


GOOD = {"sum": "1+1", "result": "2"}


@pytest.mark.parametrize(
    ("data", "args", "told"),
    [
        # a file, a folder, a name
        (lambda folder: str(folder / "none.csv"), {}, r"none\.csv: no such file"),
        (lambda folder: "owner/never-downloaded", {}, "hf download owner/never-downloaded --repo-type dataset"),
        (of_file("data.txt", "1+1 2"), {}, r"data\.txt: expected .*\.jsonl"),
        (of_file("data.csv", "sum,result\n"), {}, "no rows"),
        (of_file("data.arrow", "no arrow"), {}, r"data\.arrow cannot be read"),
        (lambda folder: str(Path(write(folder / "a/x.csv", [GOOD])).parent), {"subset": "b"}, "there are default"),
        (of_rows({"sum": "1", "result": float("nan")}), {}, r":1: answer is None"),
        (lambda folder: str(Path(write(folder / "train.csv", [GOOD])).parent), {"split": "test"}, "there are train"),
        # a table
        (of_file("data.csv", "sum,sum\n1,2\n"), {}, r"data\.csv:1: the columns"),
        (of_file("data.csv", "sum,result\n1+1,2\n1+2,3,4\n"), {}, r"data\.csv:3: 3 cells, expected 2"),
        (of_file("data.csv", 'sum,result\n1+1,2\n"1+2,3\n'), {}, r"data\.csv:3: no CSV"),
        # a row
        (of_file("data.jsonl", b'{"sum": "\xff"}'), {}, r"data\.jsonl:1: byte 9 \(0xff\) is not UTF-8"),
        (of_file("data.jsonl", '["1+1", "2"]'), {}, r"data\.jsonl:1: .*no object"),
        (of_rows(GOOD, {"sum": "1+2", "reslut": "3"}), {}, r":2: there is no column 'result'; there are sum, reslut"),
        # a prompt
        (of_rows({"sum": " ", "result": "2"}), {"prompt": "sum"}, r":1: the prompt is empty"),
        (of_rows({"sum": "x" * (MAX_CHARS + 1), "result": "2"}), {}, r":1: the prompt has 1,000,00"),
        # an answer
        (of_rows({"sum": "1", "result": "two"}), {}, r":1: answer is 'two', which is no number"),
        (of_rows({"sum": "1", "result": "$$"}), {"reward": "math"}, r":1: .*math-verify cannot read"),
        (of_rows({"sum": "1", "tests": ["f()"]}), {"reward": "unit_tests", "answer": None}, ":1: .*pass every program"),
        (of_rows(GOOD, {**GOOD, "result": "3"}), {}, r":2: the prompt is that of .*:1, with another answer"),
    ],
)
def test_bad_data_is_told_in_one_clear_line(tmp_path: Path, data: Any, args: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        made(data(tmp_path), **args)
    assert "\n" not in str(raised.value)


def test_rows_that_cannot_be_used_are_counted_and_no_other_is_lost(tmp_path: Path) -> None:
    rows = [*sums(50), {"sum": "x", "result": "?"}, *sums(100)[50:], sums(1)[0], {"sum": "y"}]
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(UserError, match=r"data\.jsonl:51: .* \(2 of 102 rows cannot be used\)"):
        made(path)
    loaded = made(path, skip_refused=True).loaded
    assert [row.place for row in loaded.refused] == [f"{path}:51", f"{path}:103"]
    assert [(row.place, row.why) for row in loaded.duplicates] == [(f"{path}:102", f"says the same as {path}:1")]
    assert sum(map(len, loaded.examples.values())) == 100


def test_messages_and_columns_within_columns(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": 1}, "image": b"\xff"}
    path = write(tmp_path / "data.parquet", [row | {"at": datetime(1970, 1, 1)}])
    environment = Dataset(
        path=path, eval_path=path, answer="reward_model.ground_truth", reward="number", system_prompt="C."
    )
    [first] = environment.dataset("eval")
    assert [message["role"] for message in first["prompt"]] == ["system", "user"]
    assert (first["answer"], first["at"], "image" in first) == (1, "1970-01-01 00:00:00", False)


# --- files that hold more than they look ---


@pytest.mark.parametrize(("rows", "chars"), [(1, 1 << 24), (1 << 14, 1 << 10)])
def test_a_small_file_that_unpacks_to_much_is_refused(
    rows: int, chars: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MIN_UNPACKED_BYTES", 1 << 20)
    table = pyarrow.table({"sum": ["a" * chars] * rows, "result": ["1"] * rows})
    pyarrow.parquet.write_table(table, path := tmp_path / "bomb.parquet", compression="zstd", use_dictionary=True)
    assert path.stat().st_size < 8_000
    with pytest.raises(UserError, match=r"bomb\.parquet.*give a part"):
        made(str(path))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "arrow", "json"])
def test_more_rows_than_a_process_should_keep_are_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 20)
    made(write(tmp_path / f"data.{suffix}", sums(20)))
    with pytest.raises(UserError, match="20 rows"):
        made(write(tmp_path / f"data.{suffix}", sums(21)))


@pytest.mark.parametrize("name", ["MAX_BYTES", "MAX_LINE_BYTES", "MAX_CELL_CHARS"])
def test_a_cell_a_line_and_a_file_have_a_longest(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, name, 100)
    usual = csv.field_size_limit()
    with pytest.raises(UserError, match=r"data\.csv"):
        made(write(tmp_path / "data.csv", [*sums(3), {"sum": "9" * 200, "result": "1"}]))
    csv.field_size_limit(usual)  # is the whole process's


def test_a_long_prompt_is_shown_by_its_beginning(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}{'a' * 100_000}", "answer": "b" * 100_000} for number in range(20)]
    shown = grpo("data", write(tmp_path / "data.jsonl", rows)).stdout
    assert "100,00" in shown
    assert len(shown) < 30_000
