"""What is on disk after a power cut: folders and files under their names are whole, and stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo.transport import folders
from grpo.transport.errors import StorageError
from grpo.transport.folders import ANNOUNCED, STABLE, mark_stable, write_atomic, write_folder
from grpo.transport.status import StatusFile

from tests.transport.power_cut import recorded

FILES = {"weights": b"w" * 1000, "canary": b"c"}
BELOW = {"adapters/second/weights": b"v"}


@pytest.mark.parametrize("old", [None, "replace", "reuse"])
def test_a_folder_that_has_its_name_is_whole_after_a_power_cut(tmp_path: Path, old: str | None) -> None:
    folder, spare = tmp_path / "step_000002", tmp_path / "step_000001"
    options: dict[str, Any] = {"replace": True} if old == "replace" else {"reuse": spare} if old else {}
    with recorded() as disk:
        if old is not None:
            write_folder(spare if old == "reuse" else folder, {"weights": b"old"}, lambda _: b"{}")
        write_folder(folder, FILES if old == "reuse" else FILES | BELOW, lambda _: b"{}", **options)
        assert disk.too_early == []
        assert disk.unsynced(folder) == []
        assert disk.keeps(folder)


def test_a_file_that_is_replaced_and_a_folder_that_is_marked_stable_stay_so_after_a_power_cut(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    with recorded() as disk:
        for data in (b"old", b"new"):
            write_atomic(tmp_path / "file", data)
            assert disk.unsynced(tmp_path / "file") == disk.too_early == []
            assert disk.keeps(tmp_path / "file")
        write_folder(folder, FILES, lambda _: b"{}", marker=ANNOUNCED)
        mark_stable(folder)
        assert disk.unsynced(folder) == disk.too_early == []
        assert disk.keeps(folder / STABLE)


def test_what_is_not_durable_is_not_synced(tmp_path: Path) -> None:
    with recorded() as disk:
        write_folder(tmp_path / "folder", FILES, lambda _: b"{}", durable=False)
        write_atomic(tmp_path / "file", b"new", durable=False)
        assert disk.num_synced == 0


def test_a_folder_that_is_reused_holds_only_what_is_written(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_folder(old, {"rank_0": b"long content", "rank_1": b"b"}, lambda _: b"an old manifest", marker=ANNOUNCED)
    write_folder(new, {"rank_0": b"short"}, lambda _: b"{}", reuse=old)
    held = {path.name: path.read_bytes() for path in new.iterdir()}
    assert held == {"rank_0": b"short", folders.MANIFEST: b"{}", STABLE: folders.digest_of(b"{}").encode()}
    assert not old.exists()


def test_a_full_disk_names_file_folder_and_remedy_keeps_what_was_there_and_no_temporary_file(
    tmp_path: Path, small_disk: Callable[[Path], None]
) -> None:
    disk = tmp_path / "disk"
    small_disk(disk)
    write_atomic(disk / "status.json", b"old")
    write_folder(disk / "there", {"weights": b"old"}, lambda _: b"{}")
    files = {"weights": bytes(2**20)}
    for write in (
        lambda: write_atomic(disk / "status.json", bytes(2**20)),
        lambda: write_folder(disk / "folder", files, lambda _: b"{}"),
        lambda: write_folder(disk / "there", files, lambda _: b"{}", replace=True),
    ):
        with pytest.raises(StorageError, match=rf"{disk}/\w.* cannot be .* room in {disk} or"):
            write()
    assert (disk / "status.json").read_bytes() == (disk / "there" / "weights").read_bytes() == b"old"
    assert {one.name for one in disk.iterdir()} == {"status.json", "there"}


def test_leftovers_are_those_of_the_writer_that_removes_them(tmp_path: Path) -> None:
    for name in (".train.json.5f0c.tmp", ".orch.json.5f0c.tmp"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".train.json.5f0d.tmp").mkdir()
    StatusFile(tmp_path / "train.json").set("waiting")
    assert sorted(one.name for one in tmp_path.iterdir()) == [".orch.json.5f0c.tmp", "train.json"]
