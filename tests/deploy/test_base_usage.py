"""What the base weights of a co-located run take: read from a trainer's log and from the processes themselves."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from deploy.base_usage import FILE, BaseUsage, Borrowed, read_usage
from deploy.base_watch import AGAIN_S, BaseWatch, said_in
from trainer.borrowed import _Source
from transport.run import RunFolder, found_run
from transport.shared_base.memory import NAME

SAID = (
    "2026-01-02 03:04:05,678 INFO trainer.borrowed: base weights: 55 tensors (4000000 bytes) are the server's, "
    "{} were read from disk{}\n"
)
MIB = 2**20
LENT = 4 * MIB
# A lender that holds pages of its own too, and the borrower that it starts.
LENDER = f"""
import mmap, os, subprocess, sys
fd = os.memfd_create({NAME!r}, 0)
os.ftruncate(fd, {LENT})
memory = mmap.mmap(fd, {LENT})
memory[:] = bytes([1]) * {LENT}
borrower = '''
import mmap, sys
memory = mmap.mmap({{}}, {LENT}, mmap.MAP_SHARED, mmap.PROT_READ)
sum(memory[::4096])
print("read", flush=True)
sys.stdin.read()
'''.format(fd)
subprocess.run([sys.executable, "-I", "-S", "-c", borrower], pass_fds=[fd])
"""


def below(code: str, *arguments: int) -> str:
    """What runs `code` as a process of its own."""
    command = [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]
    return f"import subprocess; subprocess.run({command!r}, close_fds=False)"


def started(code: str, *descriptors: int) -> "subprocess.Popen[str]":
    """Once it says `read`; it ends with its input. It inherits the descriptors."""
    command, pipe = [sys.executable, "-I", "-S", "-c", code], subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=descriptors)
    assert process.stdout
    assert process.stdout.readline() == "read\n"
    return process


def look_again(watch: BaseWatch, pids: dict[str, int]) -> None:
    watch._next_s = 0.0
    watch.tick(pids)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return found_run(tmp_path / "run")


@pytest.fixture
def lender() -> Iterator[int]:
    """A process, whose child borrows."""
    with started(LENDER) as process:
        yield process.pid


def test_what_the_trainer_borrowed_and_what_it_read_is_in_its_log() -> None:
    assert said_in("INFO trainer: nothing of it\n") is None
    first = SAID.format("0 (0 bytes)", "")
    assert said_in(first) == Borrowed(num_tensors=55, num_bytes=4000000, from_disk_bytes=0, from_disk=())
    again = Borrowed(num_tensors=55, num_bytes=4000000, from_disk_bytes=96, from_disk=("a.scale", "b.scale"))
    assert said_in(first + SAID.format("2 (96 bytes)", ": a.scale, b.scale")) == again


def test_what_the_trainer_says_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    source = SimpleNamespace(_used={"a": 60, "b": 40}, _loaded={"d": 7, "c": 5})
    with caplog.at_level("INFO"):
        _Source.tell(cast(_Source, source))
    assert said_in(caplog.messages[0] + "\n") == Borrowed(
        num_tensors=2, num_bytes=100, from_disk_bytes=12, from_disk=("c", "d")
    )


def test_pages_that_several_processes_have_count_once(run: RunFolder, lender: int) -> None:
    watch = BaseWatch(run)
    pids = {"infer": os.getpid(), "train": lender}
    watch.tick(pids)
    assert watch.usage is None  # the trainer has said nothing yet
    (run.logs / "train.log").write_text(SAID.format("0 (0 bytes)", "").replace("4000000", str(LENT)))
    (run.broadcasts / "step_000000").mkdir()
    watch._next_s = 0.0
    watch.tick(pids)
    usage = watch.usage
    assert usage is not None
    # This process is above both, so that it has the whole of what they map; the borrower is the lender's child.
    assert usage.proportional["infer"] == pytest.approx(LENT, rel=0.01)
    assert usage.proportional["train"] == pytest.approx(LENT / 2, rel=0.01)
    watch.keep()
    assert read_usage(run.path) == usage


def test_a_trainer_that_has_ended_leaves_what_was_seen_of_it(run: RunFolder) -> None:
    watch = BaseWatch(run)
    (run.logs / "train.log").write_text(SAID.format("0 (0 bytes)", ""))
    (run.broadcasts / "step_000000").mkdir()
    with started(LENDER) as process:
        pids = {"infer": os.getpid(), "train": process.pid}
        watch.tick(pids)
        seen = watch.usage
        assert seen is not None
        assert (seen.trainer_peak or 0) > MIB
    watch._next_s = watch._again_s = 0.0
    watch.tick(pids)
    assert watch.usage == seen


def test_a_line_that_is_half_written_is_read_when_it_is_whole(run: RunFolder, lender: int) -> None:
    watch, pids, said = BaseWatch(run), {"infer": os.getpid(), "train": lender}, SAID.format("0 (0 bytes)", "")
    (run.broadcasts / "step_000000").mkdir()
    (run.logs / "train.log").write_text(said[:-20])
    watch.tick(pids)
    assert watch.usage is None
    (run.logs / "train.log").write_text(said)
    look_again(watch, pids)
    assert watch.usage is not None


def test_a_look_is_made_from_time_to_time(run: RunFolder) -> None:
    watch, pids = BaseWatch(run), {"infer": os.getpid(), "train": os.getpid()}
    watch.tick(pids)
    (run.logs / "train.log").write_text(SAID.format("0 (0 bytes)", ""))
    (run.broadcasts / "step_000000").mkdir()
    watch.tick(pids)
    assert watch.usage is None


def test_where_no_main_memory_is_lent_only_arithmetic_is_told(run: RunFolder) -> None:
    (run.logs / "train.log").write_text("")
    watch = BaseWatch(run)
    (run.logs / "train.log").write_text(SAID.format("1 (96 bytes)", ": a.scale"))
    (run.broadcasts / "step_000000").mkdir()
    watch.tick({"infer": os.getpid(), "train": os.getpid()})
    assert watch.usage is not None
    assert (watch.usage.total, watch.usage.trainer_peak, watch.usage.one_copy) == (None, None, 4000096)
    assert str(watch.usage) == "3.8 MiB are shared; 2 copies would take 7.6 MiB"
    assert dict(watch.usage.rows())["read from disk besides"] == "1 tensors, 96 bytes: a.scale"


# A process that maps a memory of its own, as a server that was started again, or a trainer that has the one before.
ALONE = f"""
import mmap, os, sys
fd = os.memfd_create({NAME!r}, 0)
os.ftruncate(fd, {LENT})
memory = mmap.mmap(fd, {LENT})
memory[:] = bytes([1]) * {LENT}
print("read", flush=True)
sys.stdin.read()
"""
BELOW = below(ALONE)


def test_a_program_that_was_started_again_is_looked_at_at_once_and_two_copies_are_told(run: RunFolder) -> None:
    watch = BaseWatch(run)
    (run.logs / "train.log").write_text(SAID.format("0 (0 bytes)", "").replace("4000000", str(LENT)))
    (run.broadcasts / "step_000000").mkdir()
    with started(BELOW) as trainer, started(BELOW) as server:
        watch.tick({"train": trainer.pid})  # it has what it borrowed of a server that has ended
        assert watch.usage is not None
        assert watch.usage.total is None
        look_again(watch, {"infer": server.pid, "train": trainer.pid})
        usage = watch.usage
        assert usage.total == usage.most == pytest.approx(2 * LENT, rel=0.01)
        assert watch._again_s - watch._next_s < AGAIN_S / 2
        look_again(watch, {"infer": server.pid})  # the trainer is started again
        assert watch.usage == usage
    look_again(watch, {"infer": server.pid, "train": trainer.pid})  # both have ended
    assert watch.usage == usage


# A trainer that borrows anew, and then has memory of its own, each when it is told to; before that its peak may be made
# to begin again, as `alternate` does.
ANEW = f"""
import mmap, sys

def borrowed(fd):
    memory = mmap.mmap(fd, {LENT}, mmap.MAP_SHARED, mmap.PROT_READ)
    sum(memory[::4096])
    return memory

old = borrowed(int(sys.argv[1]))
print("read", flush=True)
sys.stdin.readline()
new = borrowed(int(sys.argv[2]))
old.close()
print("read", flush=True)
if (num_bytes := int(sys.stdin.readline() or 0)) < {LENT}:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
own = bytes([1]) * num_bytes
print("read", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def lent() -> Iterator[tuple[int, int]]:
    """Two memories of the same bytes, as of a server before and after it was started again."""
    descriptors = os.memfd_create(NAME), os.memfd_create(NAME)
    for descriptor in descriptors:
        os.pwrite(descriptor, bytes([1]) * LENT, 0)
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("num_own", [3 * LENT, LENT // 2])
def test_the_moment_at_which_a_trainer_has_two_copies_is_not_its_own_peak(
    run: RunFolder, lent: tuple[int, int], num_own: int
) -> None:
    """What it has of its own later is told: more than hid behind the second copy, or any once its peak begins again."""
    watch = BaseWatch(run)
    (run.logs / "train.log").write_text(SAID.format("0 (0 bytes)", "").replace("4000000", str(LENT)))
    (run.broadcasts / "step_000000").mkdir()

    def peak(trainer: int, *servers: "subprocess.Popen[str]") -> int:
        for server in servers:
            watch._next_s = watch._again_s = 0.0
            watch.tick({"infer": server.pid, "train": trainer})
        assert watch.usage is not None
        return watch.usage.trainer_peak or 0

    def go_on(process: "subprocess.Popen[str]", num_bytes: int = 0) -> None:
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{num_bytes}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "read\n"

    with started(below(ANEW, *lent), *lent) as trainer:
        with started(below(ANEW, lent[0], lent[0]), *lent) as first:
            before = peak(trainer.pid, first)
        assert before > MIB
        with started(below(ANEW, lent[1], lent[1]), *lent) as second:
            peak(trainer.pid, second)
            go_on(trainer)
            look_again(watch, {"infer": second.pid, "train": trainer.pid})  # at the peak alone
            assert peak(trainer.pid, second, second) == before
            go_on(trainer, num_own)
            assert peak(trainer.pid, second) == pytest.approx(before + num_own, abs=MIB)


def test_the_most_is_told_where_it_was_more_than_at_the_end() -> None:
    borrowed = Borrowed(num_tensors=3, num_bytes=100 * MIB, from_disk_bytes=0, from_disk=())
    usage = BaseUsage(
        borrowed=borrowed, proportional={"infer": 50 * MIB, "train": 50 * MIB}, num_processes=2, most=200 * MIB
    )
    assert dict(usage.rows())["at most, while one was started again"] == "200.0 MiB, 2.00 of one copy"
    assert "at most, while one was started again" not in dict(replace(usage, most=101 * MIB).rows())


def test_the_sum_is_compared_with_copies_of_their_own() -> None:
    borrowed = Borrowed(num_tensors=3, num_bytes=90 * MIB, from_disk_bytes=10 * MIB, from_disk=("x",))
    usage = BaseUsage(
        borrowed=borrowed,
        proportional={"infer": 50 * MIB, "train": 40 * MIB},
        num_processes=3,  # a server, two ranks
        trainer_peak=MIB,
    )
    # 90 once, and 10 in each of the two ranks; the server's own 10 are in neither.
    assert (usage.total, usage.apart) == (110 * MIB, 300 * MIB)
    assert str(usage) == "110.0 MiB, 1.10 of one copy; 3 copies would take 300.0 MiB"


def test_a_file_that_is_torn_or_of_another_release_is_no_usage(run: RunFolder) -> None:
    assert read_usage(run.path) is None
    for text in ("{", "[]", '{"borrowed": {}}', '{"borrowed": 3}'):
        (run.path / FILE).write_text(text)
        assert read_usage(run.path) is None


def test_what_cannot_be_written_ends_no_run(run: RunFolder) -> None:
    watch = BaseWatch(run)
    borrowed = Borrowed(num_tensors=1, num_bytes=4, from_disk_bytes=0, from_disk=())
    watch.usage = BaseUsage(borrowed=borrowed, proportional={}, num_processes=2)
    shutil.rmtree(run.path)
    watch.keep()
    assert not run.path.exists()
