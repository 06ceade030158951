"""The contract of the weight channel; damaged folders; who may remove what; shards."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace

from configs.common import FilesystemBroadcast, publisher_arguments
from tests.transport.samples import SPEC, damage
from transport.errors import CorruptError, SchemaVersionError, StaleRunError, StorageError
from transport.folders import STABLE, step_folder
from transport.records import PolicySpec
from transport.run import create_run
from transport.weights.shards import INDEX_FILE, Weight, shard_files, weight_map
from transport.weights.store import (
    ADAPTER_FILE,
    CANARY_FILE,
    IN_USE_FILE,
    METRICS_FILE,
    InUse,
    PolicyPublisher,
    PolicyReader,
    Retention,
    open_publisher,
    read_in_use,
    verify_policy,
    write_in_use,
)

KEEP_TWO = Retention(keep_last=2, keep_interval=None)
FULL = replace(SPEC, kind="full", rank=0, alpha=0, target_modules=())


def files(version: int) -> dict[str, bytes]:
    """A version whose files tell which it is."""
    return {ADAPTER_FILE: b"weights %d" % version * 100, CANARY_FILE: json.dumps({"version": version}).encode()}


class Policies:
    """Makes both ends of one channel, and remakes them as a restart of a process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def publisher(self) -> PolicyPublisher:
        return PolicyPublisher(self.folder, run_id="run", retention=KEEP_TWO)

    def reader(self) -> PolicyReader:
        return PolicyReader(self.folder, run_id="run")

    def use(self, in_use: InUse) -> None:
        write_in_use(self.folder, in_use)


@pytest.fixture
def policies(tmp_path: Path) -> Policies:
    return Policies(tmp_path)


def present(reader: PolicyReader, among: int = 30) -> list[int]:
    return [version for version in range(among) if reader.poll(version) is not None]


def test_versions_are_there_in_the_order_of_publication_and_in_any_order_of_reading(policies: Policies) -> None:
    publisher, reader = policies.publisher(), policies.reader()
    for version in (0, 1, 2, 3):
        assert reader.poll(version) is None
        publisher.publish(version=version, spec=SPEC, files=files(version))
        assert reader.latest() == version
    for version in (3, 1, 2, 0):
        read = reader.poll(version)
        assert read is not None
        assert (read.manifest.version, read.small_files[CANARY_FILE]) == (version, files(version)[CANARY_FILE])


def test_a_version_that_is_published_again_with_other_content_is_the_newer_one(policies: Policies) -> None:
    publisher, reader = policies.publisher(), policies.reader()
    for number in (4, 5, 6):
        publisher.publish(version=4, spec=SPEC, files=files(number))
    read = reader.poll(4)
    assert read is not None
    assert read.small_files[CANARY_FILE] == files(6)[CANARY_FILE]


def test_either_end_may_restart_and_finds_what_was_published(policies: Policies) -> None:
    policies.publisher().publish(version=0, spec=SPEC, files=files(0))
    policies.publisher().publish(version=1, spec=SPEC, files=files(1))
    assert present(policies.reader()) == [0, 1]


def test_content_that_is_made_in_pieces_arrives_as_one_file(policies: Policies) -> None:
    pieces = lambda: iter((b"ab", memoryview(b"cd"), b""))  # noqa: E731 - what a caller would write
    policies.publisher().publish(version=0, spec=SPEC, files={CANARY_FILE: pieces})
    read = policies.reader().poll(0)
    assert read is not None
    assert (read.small_files[CANARY_FILE], read.manifest.files[CANARY_FILE].size_bytes) == (b"abcd", 4)


def test_content_whose_making_fails_leaves_nothing(policies: Policies) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ZeroDivisionError("the matrix is odd")

    publisher, reader = policies.publisher(), policies.reader()
    publisher.publish(version=0, spec=SPEC, files=files(0))
    with pytest.raises(ZeroDivisionError):
        publisher.publish(version=1, spec=SPEC, files={ADAPTER_FILE: broken})
    assert present(reader) == [0]


def test_a_reader_sees_a_version_whole_while_it_is_replaced(policies: Policies) -> None:
    publisher, reader = policies.publisher(), policies.reader()
    stop = threading.Event()

    def replace_for_ever() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            publisher.publish(version=1, spec=replace(SPEC, rank=number), files=files(number))

    publisher.publish(version=1, spec=SPEC, files=files(SPEC.rank))
    thread = threading.Thread(target=replace_for_ever)
    thread.start()
    try:
        for _ in range(300):
            read = reader.poll(1)
            if read is not None:
                assert read.small_files[CANARY_FILE] == files(read.manifest.spec.rank)[CANARY_FILE]
    finally:
        stop.set()
        thread.join()


def test_without_word_of_what_is_in_use_nothing_is_removed(policies: Policies) -> None:
    publisher = policies.publisher()
    for version in range(12):
        publisher.publish(version=version, spec=SPEC, files=files(version))
    assert present(policies.reader()) == list(range(12))


def test_versions_in_use_and_the_last_ones_stay_and_the_others_go(policies: Policies) -> None:
    publisher = policies.publisher()
    for version in range(10):
        publisher.publish(version=version, spec=SPEC, files=files(version))
    policies.use(InUse(run_id="run", versions=frozenset({3, 7}), newest=7))
    publisher.publish(version=10, spec=SPEC, files=files(10))
    assert present(policies.reader()) == [3, 7, 8, 9, 10]


# --- what may go ---


def test_what_may_go_by_hand() -> None:
    in_use = InUse(run_id="run", versions=frozenset({2, 8}), newest=8)
    assert Retention(keep_last=1, keep_interval=None).removable(range(11), in_use) == [0, 1, 3, 4, 5, 6, 7]
    assert Retention(keep_last=5, keep_interval=None).removable(range(11), in_use) == [0, 1, 3, 4, 5]
    assert Retention(keep_last=1, keep_interval=3).removable(range(11), in_use) == [1, 4, 5, 7]
    assert Retention(keep_last=20, keep_interval=None).removable(range(11), in_use) == []


def test_whatever_the_settings_no_version_in_use_and_none_that_is_still_to_come_may_go() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        newest = rng.randrange(40)
        in_use = InUse(
            run_id="run",
            versions=frozenset(rng.sample(range(newest + 1), rng.randint(0, min(5, newest)))),
            newest=newest,
        )
        retention = Retention(keep_last=rng.randint(1, 9), keep_interval=rng.choice([None, 1, 4, 7]))
        published = rng.sample(range(50), 30)
        gone = retention.removable(published, in_use)
        assert not set(gone) & in_use.versions
        assert all(version < newest for version in gone)
        assert all(a < b for a, b in pairwise(gone))
        assert set(sorted(published)[-retention.keep_last :]).isdisjoint(gone)


def test_a_version_of_several_adapters_is_published_read_and_removed_whole(policies: Policies) -> None:
    spec = replace(SPEC, adapters=("solver", "proposer"))
    several = files(0) | {f"adapters/proposer/{name}": data for name, data in files(1).items()}
    publisher = policies.publisher()
    publisher.publish(version=0, spec=spec, files=several)
    found = policies.reader().poll(0)
    assert found is not None
    assert found.manifest.spec == spec
    assert found.manifest.files.keys() == several.keys()
    assert found.small_files["adapters/proposer/canary.json"] == several["adapters/proposer/canary.json"]
    publisher.publish(version=0, spec=spec, files=several)
    policies.use(InUse(run_id="run", versions=frozenset({3}), newest=3))
    for version in (1, 2, 3):
        publisher.publish(version=version, spec=spec, files=several)
    assert [policies.reader().poll(version) is not None for version in range(4)] == [False, False, True, True]


def test_a_file_of_any_adapter_that_was_changed_is_noticed(tmp_path: Path) -> None:
    spec = replace(SPEC, adapters=("solver", "proposer"))
    several = files(0) | {f"adapters/proposer/{name}": data for name, data in files(1).items()}
    publisher = PolicyPublisher(tmp_path, run_id="run")
    publisher.publish(version=0, spec=spec, files=several)
    path = step_folder(tmp_path, 0) / "adapters/proposer" / ADAPTER_FILE
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CorruptError, match="adapters/proposer"):
        verify_policy(step_folder(tmp_path, 0), run_id="run", version=0)


def test_what_is_in_use_is_read_as_written_and_not_from_another_run(tmp_path: Path) -> None:
    assert read_in_use(tmp_path, run_id="run") is None
    write_in_use(tmp_path, InUse(run_id="run", versions=frozenset({3, 4}), newest=4))
    assert read_in_use(tmp_path, run_id="run") == InUse(run_id="run", versions=frozenset({3, 4}), newest=4)
    assert read_in_use(tmp_path, run_id="other") is None


@pytest.mark.parametrize("damaged", [b"", b"{", b'{"run_id": "run"}', b'{"run_id": "run", "versions": 3, "newest": 1}'])
def test_a_damaged_file_of_what_is_in_use_removes_nothing(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = PolicyPublisher(tmp_path, run_id="run", retention=KEEP_TWO)
    (tmp_path / IN_USE_FILE).write_bytes(damaged)
    for version in range(5):
        publisher.publish(version=version, spec=SPEC, files=files(version))
    assert present(PolicyReader(tmp_path, run_id="run")) == list(range(5))
    assert [record for record in caplog.records if record.levelname == "WARNING"]


def test_what_cannot_be_removed_stays_and_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = PolicyPublisher(tmp_path, run_id="run", retention=KEEP_TWO)
    for version in range(4):
        publisher.publish(version=version, spec=SPEC, files=files(version))
    write_in_use(tmp_path, InUse(run_id="run", versions=frozenset(), newest=3))

    def forbidden(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("transport.weights.store.remove_folder", forbidden)
    publisher.publish(version=4, spec=SPEC, files=files(4))
    assert present(PolicyReader(tmp_path, run_id="run")) == [0, 1, 2, 3, 4]
    assert [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_trainers_settings_make_the_channel(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    publisher = open_publisher(run, **publisher_arguments(FilesystemBroadcast(keep_last=1)))
    write_in_use(run.broadcasts, InUse(run_id=run.run_id, versions=frozenset({2}), newest=2))
    for version in range(3):
        publisher.publish(version=version, spec=SPEC, files=files(version))
    assert present(PolicyReader(run.broadcasts, run_id=run.run_id)) == [2]


# --- folders ---


def published(folder: Path, spec: PolicySpec = SPEC) -> Path:
    """Version 2 of run `run`."""
    PolicyPublisher(folder, run_id="run").publish(version=2, spec=spec, files=files(2))
    return step_folder(folder, 2)


@pytest.mark.parametrize(("name", "how"), [(CANARY_FILE, "flip"), ("manifest.json", "truncate"), (STABLE, "flip")])
def test_a_damaged_version_is_refused_by_the_reader(tmp_path: Path, name: str, how: str) -> None:
    damage(published(tmp_path) / name, how)
    with pytest.raises((CorruptError, SchemaVersionError)):
        PolicyReader(tmp_path, run_id="run").poll(2)


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
@pytest.mark.parametrize(
    ("name", "spec"), [(ADAPTER_FILE, SPEC), (ADAPTER_FILE, FULL), (CANARY_FILE, SPEC), ("manifest.json", FULL)]
)
def test_a_damaged_version_is_refused_by_the_server(tmp_path: Path, name: str, how: str, spec: PolicySpec) -> None:
    folder = published(tmp_path, spec)
    verify_policy(folder, run_id="run", version=2)
    damage(folder / name, how)
    with pytest.raises((CorruptError, SchemaVersionError)):
        verify_policy(folder, run_id="run", version=2)


def test_large_weights_are_checked_but_not_held(tmp_path: Path) -> None:
    _, held = verify_policy(published(tmp_path, FULL), run_id="run", version=2)
    assert list(held) == [CANARY_FILE]


def test_a_version_of_another_run_or_of_another_number_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    with pytest.raises(StaleRunError):
        PolicyReader(tmp_path, run_id="other").poll(2)
    folder.rename(step_folder(tmp_path, 3))
    with pytest.raises(CorruptError):
        PolicyReader(tmp_path, run_id="run").poll(3)


def test_a_full_disk_is_an_error_that_leaves_the_earlier_versions(
    tmp_path: Path, small_disk: Callable[[Path], None]
) -> None:
    folder = tmp_path / "disk"
    small_disk(folder)
    publisher, reader = PolicyPublisher(folder, run_id="run"), PolicyReader(folder, run_id="run")
    publisher.publish(version=0, spec=SPEC, files=files(0))
    for version in (0, 1):
        with pytest.raises(StorageError):
            publisher.publish(version=version, spec=SPEC, files={ADAPTER_FILE: bytes(400_000)})
        assert present(reader) == [0]
        assert not list(folder.glob(".*"))
    publisher.publish(version=1, spec=SPEC, files=files(1))
    assert present(reader) == [0, 1]


def test_a_folder_that_forbids_writing_is_an_error_that_leaves_the_earlier_versions(
    tmp_path: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    tmp_path.chmod(0o755)
    publisher, reader = (
        PolicyPublisher(tmp_path, run_id="run"),
        PolicyReader(tmp_path, run_id="run"),
    )
    publisher.publish(version=0, spec=SPEC, files=files(0))
    with unprivileged(), pytest.raises(StorageError):
        publisher.publish(version=1, spec=SPEC, files=files(1))
    publisher.publish(version=1, spec=SPEC, files=files(1))
    assert present(reader) == [0, 1]


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
    assert is_written_anew(spec=replace(spec, sequence_len=1))
    damage(folder / ADAPTER_FILE, "truncate")
    assert is_written_anew()
    assert is_written_anew(run_id="another")


def test_leftovers_of_a_killed_publisher_are_removed_by_the_next(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / ".step_000001.abc.tmp").mkdir()
    PolicyPublisher(tmp_path, run_id="run")
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


# --- shards ---


def weights(num: int = 5, rows: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}.weight": torch.randn((rows, n + 1), generator=generator) for n in range(num)}


def as_weights(tensors: Mapping[str, torch.Tensor]) -> list[Weight]:
    return [
        Weight(name=name, dtype="float32", shape=tuple(tensor.shape), tensor=lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]


@pytest.mark.parametrize("limit", [1, 130, 400, 10_000])
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


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{}",
        b'{"weight_map": {"w": 3}}',
        b'{"weight_map": {"w": "model-2.safetensors"}}',
        b'{"weight_map": {}}',
    ],
)
def test_an_index_that_does_not_fit_the_files_is_refused(index: bytes) -> None:
    with pytest.raises(CorruptError):
        weight_map(index, {"model-1.safetensors": None, INDEX_FILE: None})
