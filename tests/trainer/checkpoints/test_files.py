"""Checkpoints on disk: exact, whole or invisible, checked, and removed as asked."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo.configs.train import TrainSettings
from grpo.trainer.checkpoint import CheckpointStore
from grpo.transport import folders
from grpo.transport.errors import CorruptError, SchemaVersionError, StaleRunError, StorageError
from grpo.transport.run import RunFolder

from tests.transport.power_cut import recorded
from tests.transport.samples import damage

SETTINGS = TrainSettings(model="base").model_dump(mode="json")
FIELDS: dict[str, Any] = {"base_model": "base", "settings": SETTINGS, "metrics": {"loss/total": 0.1}}


def parts_of(step: int) -> dict[str, dict[str, torch.Tensor]]:
    weights = {"b": torch.arange(6.0).view(2, 3) * step, "a": torch.tensor([1.5, -0.0, float("nan")])}
    optimizer = {
        "a/step": torch.tensor(3.0),
        "a/n": torch.tensor(7),
        "a/codes": torch.tensor([0, 255], dtype=torch.uint8),
    }
    return {"weights": weights, "optimizer": optimizer, "average": {}}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(RunFolder(path=tmp_path, run_id="run"))


def test_what_is_written_is_read_again_bit_for_bit(store: CheckpointStore) -> None:
    written = parts_of(12)
    store.write(12, written, **FIELDS)
    manifest, read = store.read(12)
    assert read.keys() == {"weights", "optimizer"}  # a part without tensors leaves no file
    for part, tensors in read.items():
        assert tensors.keys() == written[part].keys()
        for name, tensor in tensors.items():
            expected = written[part][name]
            assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
            assert tensor.numpy().tobytes() == expected.numpy().tobytes()
    assert (manifest.run_id, manifest.step, manifest.metrics) == ("run", 12, {"loss/total": 0.1})
    assert manifest.settings == SETTINGS


@pytest.mark.parametrize(
    ("name", "how"), [("weights.safetensors", "flip"), ("manifest.json", "flip"), ("STABLE", "remove")]
)
def test_a_damaged_checkpoint_is_refused(store: CheckpointStore, name: str, how: str) -> None:
    store.write(12, parts_of(12), **FIELDS)
    damage(store.path(12) / name, how)
    with pytest.raises(CorruptError, match="trainer"):
        store.read(12)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"schema_version": 2}, SchemaVersionError),
        ({"step": 13}, CorruptError),
        ({"files": {"weights.safetensors": {"size_bytes": 4}}}, CorruptError),
        ({"metrics": None, "run_id": "another"}, StaleRunError),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(
    store: CheckpointStore, change: dict[str, Any], error: type[Exception]
) -> None:
    store.write(12, parts_of(12), **FIELDS)
    folder = store.path(12)
    fields = json.loads((folder / "manifest.json").read_text()) | change
    contents = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    about = json.dumps(fields).encode()
    folders.write_folder(folder, contents, lambda _: about, replace=True)
    with pytest.raises(error):
        store.read(12)


def test_a_checkpoint_that_cannot_be_written_is_invisible_and_leaves_nothing(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(StorageError, match="step_000012"):
        store.write(12, parts_of(12), **FIELDS)
    assert store.steps() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_checkpoint_that_is_there_is_whole_after_a_power_cut(store: CheckpointStore, tmp_path: Path) -> None:
    with recorded() as disk:
        store.write(12, parts_of(12), **FIELDS)
        assert disk.unsynced(tmp_path / "checkpoints") == disk.too_early == []


def test_what_a_killed_writer_left_goes(store: CheckpointStore, tmp_path: Path) -> None:
    store.write(2, parts_of(2), **FIELDS)
    for left in ("step_000004/.trainer.5f0c.tmp", "step_000002/.trainer.5f0d.tmp", ".step_000001.5f0d.tmp"):
        (tmp_path / "checkpoints" / left).mkdir(parents=True)
    assert store.steps() == [2]
    store.remove_leftovers()
    assert list(tmp_path.rglob("*.tmp")) == []
    assert store.steps() == [2]
