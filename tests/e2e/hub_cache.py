"""A Hugging Face cache with what a page names, made here: a tiny model under a large one's id, and a few rows."""

from pathlib import Path

import pyarrow
import pyarrow.parquet

from tools.random_models import make_family


def put(hub: Path, kind: str, name: str) -> Path:
    """Returns the empty snapshot folder of a repository in the cache `hub`; `kind` is `models` or `datasets`."""
    repository = hub / f"{kind}--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(snapshot.name)
    return snapshot


def put_model(hub: Path, name: str, family: str) -> Path:
    """Puts a tiny random model of this family there, under the name of a published one."""
    return make_family(put(hub, "models", name), family)


def put_sums(hub: Path, name: str) -> Path:
    """Puts sums there, in the columns and files of GSM8K."""
    folder = put(hub, "datasets", name) / "main"
    folder.mkdir()
    for split, first, num in (("train", 0, 20), ("test", 20, 4)):
        rows = [
            {
                "question": f"Anna has {n} eggs and buys {n + 2}. How many?",
                "answer": f"{n} + {n + 2}.\n#### {2 * n + 2}",
            }
            for n in range(first, first + num)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    return folder
