"""The contract of the weight channel; damaged folders; who may remove what; shards."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from grpo.transport.errors import CorruptError, SchemaVersionError, StaleRunError
from grpo.transport.folders import STABLE, removable, step_folder
from grpo.transport.records import PolicySpec
from grpo.transport.weights.shards import INDEX_FILE, Weight, shard_files, weight_map
from grpo.transport.weights.store import (
    ADAPTER_FILE,
    CANARY_FILE,
    IN_USE_FILE,
    METRICS_FILE,
    HeldVersion,
    InUse,
    PolicyPublisher,
    PolicyReader,
    PublishedPolicy,
    read_in_use,
    verify_policy,
    write_in_use,
)
from msgspec.structs import replace

from tests.transport.samples import SPEC, damage

FULL = replace(SPEC, kind="full", rank=0, alpha=0, target_modules=())
HELD = HeldVersion(snapshot=None, pins={"evaluation": 1})


def files(version: int) -> dict[str, bytes]:
    """A version whose files tell which it is."""
    return {ADAPTER_FILE: b"weights %d" % version * 100, CANARY_FILE: json.dumps({"version": version}).encode()}


def publish(folder: Path, *versions: int) -> PolicyPublisher:
    """A trainer that publishes these versions, and keeps two."""
    publisher = PolicyPublisher(folder, run_id="run", keep_last=2)
    for version in versions:
        publisher.publish(version=version, spec=SPEC, files=files(version))
    return publisher


def reader(folder: Path) -> PolicyReader:
    return PolicyReader(folder, run_id="run")


def found(folder: Path, version: int) -> PublishedPolicy:
    read = reader(folder).poll(version)
    assert read is not None
    return read


def present(folder: Path) -> list[int]:
    return [version for version in range(30) if reader(folder).poll(version) is not None]


def test_versions_are_there_as_they_are_published_also_by_a_trainer_that_restarts(tmp_path: Path) -> None:
    for version in (0, 1, 2):
        assert reader(tmp_path).poll(version) is None
        (tmp_path / ".step_000009.abc.tmp").mkdir()  # a killed publisher's
        publish(tmp_path, version)
        assert not list(tmp_path.glob(".*"))
        assert reader(tmp_path).latest() == version
    for version in (2, 0, 1):
        read = found(tmp_path, version)
        assert (read.manifest.version, read.small_files[CANARY_FILE]) == (version, files(version)[CANARY_FILE])


def test_content_that_is_made_in_pieces_arrives_as_one_file_and_one_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("the matrix is odd")

    publisher = publish(tmp_path)
    pieces = lambda: iter((b"ab", memoryview(b"cd"), b""))  # noqa: E731 - what a caller would write
    publisher.publish(version=0, spec=SPEC, files={CANARY_FILE: pieces})
    read = found(tmp_path, 0)
    assert (read.small_files[CANARY_FILE], read.manifest.files[CANARY_FILE].size_bytes) == (b"abcd", 4)
    with pytest.raises(ZeroDivisionError):
        publisher.publish(version=1, spec=SPEC, files={ADAPTER_FILE: broken})
    assert present(tmp_path) == [0]


# --- what may go ---


def test_only_what_nobody_needs_is_removed_and_nothing_without_word_of_that(tmp_path: Path) -> None:
    publish(tmp_path, *range(9))
    (tmp_path / IN_USE_FILE).write_bytes(b'{"run_id": "run", "versions": 3, "newest": 1}')  # damaged
    publish(tmp_path, 9)
    write_in_use(tmp_path, InUse(run_id="other", versions={}, newest=7))
    publish(tmp_path, 10)
    assert present(tmp_path) == list(range(11))
    write_in_use(tmp_path, InUse(run_id="run", versions=dict.fromkeys((3, 7), HELD), newest=7))
    assert read_in_use(tmp_path, run_id="run") == InUse(run_id="run", versions=dict.fromkeys((3, 7), HELD), newest=7)
    publish(tmp_path, 11)
    assert present(tmp_path) == [3, 7, 8, 9, 10, 11]


def test_what_may_go_by_hand() -> None:
    steps = [2, 4, 6, 8, 10]
    assert removable(steps, keep_last=None, keep_interval=None) == []
    assert removable(steps, keep_last=2, keep_interval=None) == [2, 4, 6]
    assert removable(steps, keep_last=2, keep_interval=4) == [2, 6]
    assert removable(steps, keep_last=9, keep_interval=None) == []


def test_a_version_of_several_adapters_is_published_checked_and_removed_whole(tmp_path: Path) -> None:
    spec = replace(SPEC, adapters=("solver", "proposer"))
    several = files(0) | {f"adapters/proposer/{name}": data for name, data in files(1).items()}
    publisher = publish(tmp_path)
    publisher.publish(version=0, spec=spec, files=several)
    read = found(tmp_path, 0)
    assert (read.manifest.spec, read.manifest.files.keys()) == (spec, several.keys())
    assert read.small_files["adapters/proposer/canary.json"] == several["adapters/proposer/canary.json"]
    damage(step_folder(tmp_path, 0) / "adapters/proposer" / ADAPTER_FILE, "flip")
    with pytest.raises(CorruptError, match="adapters/proposer"):
        verify_policy(step_folder(tmp_path, 0), run_id="run", version=0)
    write_in_use(tmp_path, InUse(run_id="run", versions={3: HELD}, newest=3))
    publish(tmp_path, 1, 2, 3)
    assert present(tmp_path) == [2, 3]


def test_what_cannot_be_removed_stays_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, *range(4))
    write_in_use(tmp_path, InUse(run_id="run", versions={}, newest=3))

    def forbidden(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("grpo.transport.weights.store.remove_folder", forbidden)
    publish(tmp_path, 4)
    assert present(tmp_path) == [0, 1, 2, 3, 4]


# --- folders ---


@pytest.mark.parametrize(
    ("name", "how", "spec"),
    [
        (ADAPTER_FILE, "flip", SPEC),
        (ADAPTER_FILE, "remove", FULL),
        (CANARY_FILE, "remove", SPEC),
        (STABLE, "flip", SPEC),
    ],
)
def test_a_damaged_version_is_refused(tmp_path: Path, name: str, how: str, spec: PolicySpec) -> None:
    folder = step_folder(tmp_path, 2)
    publish(tmp_path).publish(version=2, spec=spec, files=files(2))
    _, held = verify_policy(folder, run_id="run", version=2)
    assert list(held) == ([CANARY_FILE] if spec is FULL else [ADAPTER_FILE, CANARY_FILE])
    damage(folder / name, how)
    with pytest.raises((CorruptError, SchemaVersionError)):
        verify_policy(folder, run_id="run", version=2)


def test_a_version_of_another_run_or_of_another_number_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, 2)
    with pytest.raises(StaleRunError):
        PolicyReader(tmp_path, run_id="other").poll(2)
    step_folder(tmp_path, 2).rename(step_folder(tmp_path, 3))
    with pytest.raises(CorruptError):
        reader(tmp_path).poll(3)


@pytest.mark.parametrize("spec", [SPEC, FULL])
def test_a_version_stays_untouched_where_the_same_is_published_again(tmp_path: Path, spec: PolicySpec) -> None:
    there, folder = files(3) | {METRICS_FILE: b"{}"}, step_folder(tmp_path, 3)

    def is_written_anew(run_id: str = "run", spec: PolicySpec = spec, **changes: bytes) -> bool:
        before = folder.stat().st_mtime_ns
        content = there | {name.replace("__", "."): data for name, data in changes.items()}
        PolicyPublisher(tmp_path, run_id=run_id).publish(version=3, spec=spec, files=content)
        verify_policy(folder, run_id=run_id, version=3)
        return folder.stat().st_mtime_ns != before

    PolicyPublisher(tmp_path, run_id="run").publish(version=3, spec=spec, files=there)
    assert not is_written_anew()
    assert not is_written_anew(metrics__json=b'{"time/train_s": 1}')
    assert is_written_anew(adapter_model__safetensors=b"other weights")
    assert is_written_anew(noise__safetensors=b"more")
    assert is_written_anew()
    assert is_written_anew(spec=replace(spec, sequence_len=1))
    assert is_written_anew()
    damage(folder / ADAPTER_FILE, "truncate")
    assert is_written_anew()
    assert is_written_anew(run_id="another")


def test_a_version_that_takes_the_place_of_one_with_another_adapter_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (b"some", b"some", b"other"):
        content = files(3) | {ADAPTER_FILE: data, METRICS_FILE: data}
        PolicyPublisher(tmp_path, run_id="run").publish(version=3, spec=SPEC, files=content)
    [told] = [record.getMessage() for record in caplog.records]
    assert "version 3" in told
    assert "another adapter" in told


# --- shards ---


def weights(num: int = 5, rows: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}.weight": torch.randn((rows, n + 1), generator=generator) for n in range(num)}


def as_weights(tensors: Mapping[str, torch.Tensor]) -> list[Weight]:
    return [
        Weight(name=name, dtype="float32", shape=tuple(tensor.shape), tensor=lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("limit", [1, 400])
def test_shards_hold_all_tensors_within_the_limit_and_the_library_reads_them(tmp_path: Path, limit: int) -> None:
    tensors = weights()
    publisher = PolicyPublisher(tmp_path, run_id="run", max_shard_bytes=limit)
    publisher.publish(version=0, spec=FULL, files={}, weights=as_weights(tensors))
    folder = step_folder(tmp_path, 0)
    manifest, held = verify_policy(folder, run_id="run", version=0)
    shard_of = weight_map(held[INDEX_FILE], manifest.files)
    read = {}
    for shard in sorted(set(shard_of.values())):
        content = safetensors.torch.load_file(folder / shard)
        assert len(content) == 1 or sum(tensor.nbytes for tensor in content.values()) <= limit
        assert {name for name, its in shard_of.items() if its == shard} == content.keys()
        read |= content
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert json.loads(held[INDEX_FILE])["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_shards_are_named_and_indexed_as_hugging_face_does() -> None:
    files = shard_files(as_weights(weights(num=3, rows=8)), max_shard_bytes=100)
    assert list(files) == [*(f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)), INDEX_FILE]
    # 8 rows of 1, 2 and 3 numbers of 4 bytes: 32 + 64 fit into 100, 96 begin a new shard
    assert json.loads(files[INDEX_FILE])["weight_map"] == {  # type: ignore[arg-type]
        "layer.0.weight": "model-00001-of-00002.safetensors",
        "layer.1.weight": "model-00001-of-00002.safetensors",
        "layer.2.weight": "model-00002-of-00002.safetensors",
    }


def test_a_tensor_of_another_shape_than_it_says_is_an_error() -> None:
    files = shard_files([Weight(name="w", dtype="float32", shape=(3, 2), tensor=lambda: torch.zeros(2, 3))])
    with pytest.raises(ValueError, match=r"w .*shape"):
        list(files["model-00001-of-00001.safetensors"]())  # type: ignore[operator]


@pytest.mark.parametrize("index", [b"{}", b'{"weight_map": {"w": "model-2.safetensors"}}', b'{"weight_map": {}}'])
def test_an_index_that_does_not_fit_the_files_is_refused(index: bytes) -> None:
    with pytest.raises(CorruptError):
        weight_map(index, {"model-1.safetensors": None, INDEX_FILE: None})
