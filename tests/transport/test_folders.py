"""What is on disk after a power cut: folders and files under their names are whole, and stay."""

from pathlib import Path

import pytest

from tests.transport.power_cut import recorded
from transport import folders
from transport.folders import ANNOUNCED, STABLE, mark_stable, write_atomic, write_folder

FILES = {"weights": b"w" * 1000, "canary": b"c"}
BELOW = {"adapters/second/weights": b"v"}


@pytest.mark.parametrize("old", [None, "replace", "reuse"])
def test_a_folder_that_has_its_name_is_whole_after_a_power_cut(tmp_path: Path, old: str | None) -> None:
    folder, spare = tmp_path / "step_000002", tmp_path / "step_000001"
    options: dict[str, object] = {}
    with recorded() as disk:
        if old == "replace":
            write_folder(folder, {"weights": b"old"}, lambda _: b"{}")
            options = {"replace": True}
        if old == "reuse":
            write_folder(spare, {"weights": b"old"}, lambda _: b"{}")
            options = {"reuse": spare}
        files = FILES if old == "reuse" else FILES | BELOW
        write_folder(folder, files, lambda _: b"{}", **options)  # type: ignore[arg-type]
        assert disk.too_early == []
        assert disk.unsynced(folder) == []
        assert disk.keeps(folder)


def test_a_file_that_is_replaced_is_the_old_or_the_new_one_after_a_power_cut(tmp_path: Path) -> None:
    with recorded() as disk:
        for data in (b"old", b"new"):
            write_atomic(tmp_path / "file", data)
            assert disk.unsynced(tmp_path / "file") == disk.too_early == []
            assert disk.keeps(tmp_path / "file")


def test_a_folder_that_is_marked_stable_stays_so_after_a_power_cut(tmp_path: Path) -> None:
    with recorded() as disk:
        write_folder(tmp_path / "step_000001", FILES, lambda _: b"{}", marker=ANNOUNCED)
        mark_stable(tmp_path / "step_000001")
        assert disk.keeps(tmp_path / "step_000001" / STABLE)
        assert disk.unsynced(tmp_path / "step_000001") == disk.too_early == []


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
