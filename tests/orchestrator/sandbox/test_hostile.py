"""Hostile programs: each is contained, its limit is named, and the machine is as before."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.sandbox import LimitName, Limits, LocalSandbox
from orchestrator.sandbox.records import MIB

pytestmark = pytest.mark.chaos

LIMITS = Limits(
    wall_s=20.0, cpu_s=1.0, memory_bytes=128 * MIB, processes=8, output_bytes=100_000, file_bytes=4 * MIB,
    disk_bytes=8 * MIB, num_files=200, open_files=32,
)  # fmt: skip

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
SPAWN_AND_EXIT = """
import os
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass
"""
THREADS = """
import threading, time
threading.stack_size(1 << 16)
while True:
    threading.Thread(target=time.sleep, args=(100,)).start()
"""
MEMORY = "held = bytearray(1 << 30)"
MEMORY_IN_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x") * (60 << 20)
        time.sleep(100)
time.sleep(100)
"""
SHARED_MEMORY = """
import mmap, time
held = []
while True:
    held.append(mmap.mmap(-1, 1 << 20))
    held[-1].write(b"x" * (1 << 20))
"""
LARGE_FILE = "with open('large', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 16))"
FULL_DISK = """
for number in range(100):
    with open(str(number), "wb") as file:
        file.write(bytes(1 << 20))
"""
FULL_SHARED_MEMORY_DISK = FULL_DISK.replace("str(number)", "'/dev/shm/' + str(number)")
MANY_FILES = "number = 0\nwhile True:\n    number += 1\n    open(str(number), 'w').close()"
ENDLESS_OUTPUT = "while True:\n    print('x' * 1000)"
ENDLESS_ERRORS = "import os\nwhile True:\n    os.write(2, b'x' * 1000)"
LOOP = "while True:\n    pass"
LOOPS_IN_CHILDREN = "import os\nfor _ in range(2):\n    os.fork()\nwhile True:\n    pass"
SLEEP = "import time\ntime.sleep(1000)"
IGNORES_SIGNALS = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(1000)
"""
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("parent ends")
"""
ZOMBIES = """
import os, time
started = 0
try:
    while True:
        if os.fork() == 0:
            os._exit(0)
        started += 1
except OSError:
    time.sleep(1000)
"""
STOPS = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"


@pytest.fixture(autouse=True)
def machine_unharmed() -> Iterator[None]:
    """After each test no process of a sandbox is left, and this process's network and files are in order. Other tests
    may have left processes of their own to this one."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child.name() for child in psutil.Process().children(recursive=True) if child not in before]
    assert left == []
    assert subprocess.run([sys.executable, "-c", "print(1)"], check=True, capture_output=True).stdout == b"1\n"


@pytest.mark.parametrize(
    ("program", "limits"),
    [
        (FORK_BOMB, {"processes"}),
        (SPAWN_AND_EXIT, {"processes", "cpu", None}),
        (THREADS, {"processes"}),
        (ZOMBIES, {"processes"}),
        (MEMORY, {"memory"}),
        (MEMORY_IN_CHILDREN, {"memory"}),
        (SHARED_MEMORY, {"memory"}),
        (LARGE_FILE, {"file_size"}),
        (FULL_DISK, {"disk"}),
        (FULL_SHARED_MEMORY_DISK, {"disk"}),
        (MANY_FILES, {"files"}),
        (ENDLESS_OUTPUT, {"output"}),
        (ENDLESS_ERRORS, {"output"}),
        (LOOP, {"cpu"}),
        (LOOPS_IN_CHILDREN, {"cpu"}),
    ],
)
async def test_each_limit_is_kept_and_named(
    program: str, limits: set[LimitName | None], needs_bubblewrap: None
) -> None:
    async with LocalSandbox(limits=LIMITS, parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program)
        assert result.limit in limits
        assert not result.succeeded or result.limit is None
        assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_bytes
        assert (await sandbox.run("print('well')")).stdout == b"well\n"


@pytest.mark.parametrize("program", [SLEEP, IGNORES_SIGNALS, STOPS])
async def test_what_does_not_end_is_ended_by_the_clock(program: str, needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=1.0))
    assert (result.limit, result.signal) == ("wall", 9)
    assert result.wall_s >= 1.0


async def test_output_beyond_the_limit_is_cut_and_counted(needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        program = "import sys\nsys.stdout.write('abc' * 100)\nsys.stdout.flush()"
        result = await sandbox.run(program, limits=Limits(wall_s=60.0, output_bytes=10))
    assert (result.stdout, result.stdout_bytes, result.limit) == (b"abcabcabca", 300, "output")


async def test_processes_left_behind_end_with_the_program(needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(DAEMON, limits=Limits(wall_s=500.0))
    assert (result.stdout, result.exit_code, result.limit) == (b"parent ends\n", 0, None)


async def test_the_kernel_alone_holds_a_fork_bomb_when_nobody_watches(needs_bubblewrap: None) -> None:
    """The watcher is blinded by a limit far above the kernel's own, which the program sets for itself."""
    program = """
import os, resource
resource.setrlimit(resource.RLIMIT_NPROC, (12, 12))
living = 1
r, w = os.pipe()
for _ in range(200):
    try:
        if os.fork() == 0:
            os.read(r, 1)
            os._exit(0)
        living += 1
    except OSError:
        pass
print(living)
"""
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=60.0, processes=100))
    assert result.stdout == b"11\n"


async def test_the_kernels_own_limits_are_set_before_the_program_begins(needs_bubblewrap: None) -> None:
    names = ["CPU", "AS", "NPROC", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE"]
    program = (
        f"import resource\nprint(*(resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[1] for name in {names}))"
    )
    async with LocalSandbox(limits=LIMITS, parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program)
    # a second more than asked, after the signal that tells; two processes more: the watcher, and one to be caught with
    assert result.stdout.split() == b"2 134217728 10 4194304 32 0 0 0".split()


async def test_two_sandboxes_do_not_share_a_count_of_processes(needs_bubblewrap: None) -> None:
    program = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
for _ in range(6):
    os.wait()
print("all")
"""
    async with LocalSandbox(limits=LIMITS, parallel=4, warm=0) as sandbox:
        results = await asyncio.gather(*(sandbox.run(program) for _ in range(4)))
    assert [result.stdout for result in results] == [b"all\n"] * 4


async def test_there_is_no_network(needs_bubblewrap: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import socket
print(sorted(name for _, name in socket.if_nameindex()))
for address in ("127.0.0.1", "192.0.2.1"):
    try:
        socket.create_connection((address, {port}), timeout=5)
    except OSError as error:
        print(type(error).__name__)
"""
        async with LocalSandbox(parallel=1, warm=0) as sandbox:
            result = await sandbox.run(program, limits=Limits(wall_s=60.0))
    lines = result.stdout.decode().splitlines()
    assert lines == ["['lo']", "ConnectionRefusedError", "OSError"]


async def test_the_host_cannot_be_read(needs_bubblewrap: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    monkeypatch.setenv("SECRET_KEY", "the secret")
    program = f"""
import os
print(sorted(os.listdir("/")))
print(os.listdir("/tmp"), sorted(name for name in os.listdir("/proc") if name.isdigit()))
print(sorted(os.environ))
for path in ({str(tmp_path / "secret.txt")!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/1/mem",
             "/proc/1/root/etc/passwd", "/proc/{os.getpid()}/environ", "/sys/class/net", {__file__!r}, "/proc/kcore"):
    try:
        print("READ", path, open(path, "rb").read(10))
    except OSError:
        pass
"""
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=60.0))
    roots, rest, environment, *read = result.stdout.decode().splitlines()
    assert not {"home", "work", "sys", "var", "run", "boot", "mnt", "opt"} & set(
        roots.strip("[]").replace("'", "").split(", ")
    )
    assert rest == "['main.py'] ['1', '2']"
    assert "SECRET" not in environment
    assert read == []


async def test_the_system_cannot_be_written(needs_bubblewrap: None) -> None:
    program = """
import os
for path in ("/x", "/usr/x", "/usr/bin/x", "/dev/x", "/proc/sys/kernel/hostname", "/etc/x", "/sandbox/x",
             "/sandbox/inside.py", os.__file__):
    try:
        open(path, "a").write("x")
        print("WROTE", path)
    except OSError:
        pass
for folder in ("/tmp", "/dev/shm"):
    open(folder + "/x", "w").write("x")
"""
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=60.0))
    assert (result.stdout, result.stderr, result.exit_code) == (b"", b"", 0)


async def test_nothing_of_one_program_reaches_the_next(needs_bubblewrap: None) -> None:
    leave = (
        "import builtins\nbuiltins.left = 1\nopen('/tmp/left', 'w').write('x')\nopen('/dev/shm/left', 'w').write('x')"
    )
    find = "import builtins, os\nprint(hasattr(builtins, 'left'), os.listdir('/tmp'), os.listdir('/dev/shm'))"
    async with LocalSandbox(parallel=1, warm=1) as sandbox:
        await sandbox.run(leave, limits=Limits(wall_s=60.0))
        result = await sandbox.run(find, limits=Limits(wall_s=60.0))
    assert result.stdout == b"False ['main.py'] []\n"


async def test_signals_reach_no_process_outside_nor_the_watcher(needs_bubblewrap: None) -> None:
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as bystander:  # noqa: ASYNC220
        program = f"""
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
    for pid in (1, {bystander.pid}, {os.getpid()}):
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("still here")
import sys
sys.stdout.flush()
os.kill(-1, signal.SIGKILL)
"""
        async with LocalSandbox(parallel=1, warm=0) as sandbox:
            result = await sandbox.run(program, limits=Limits(wall_s=60.0))
        assert result.stdout == b"still here\n"
        assert result.limit is None
        assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=60)


async def test_a_program_has_no_rights_and_can_get_none(needs_bubblewrap: None) -> None:
    program = """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(*(status[key].strip() for key in ("CapPrm", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp")), os.getuid() != 0)
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    ctypes.set_errno(0)
    print(name, getattr(libc, name)(*arguments), ctypes.get_errno())
attempt("unshare", 0x10000000)
attempt("mount", b"x", b"/tmp", b"tmpfs", 0, None)
attempt("ptrace", 16, 1, 0, 0)
attempt("chroot", b"/tmp")
attempt("memfd_create", b"x", 0)
attempt("setuid", 0)
"""
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=60.0))
    none = "0" * 16
    rights, *attempts = result.stdout.decode().splitlines()
    assert rights == f"{none} {none} {none} 1 2 True"
    assert [line.split()[0] for line in attempts] == ["unshare", "mount", "ptrace", "chroot", "memfd_create", "setuid"]
    assert all(line.split()[1] == "-1" for line in attempts)
    assert all(line.split()[2] == "1" for line in attempts[:-1])


def test_sandboxes_end_with_the_process_that_started_them_however_it_ends(needs_bubblewrap: None) -> None:
    program = """
import asyncio
from orchestrator.sandbox import Limits, LocalSandbox

async def main():
    async with LocalSandbox(parallel=1, warm=1) as sandbox:
        hold = "import os, time\\nos.fork()\\ntime.sleep(1000)"
        run = asyncio.create_task(sandbox.run(hold, limits=Limits(wall_s=1000)))
        await run

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program]) as owner:
        try:
            inside = wait_until_running(owner.pid)
        finally:
            owner.kill()
    gone, alive = psutil.wait_procs(inside, timeout=60)
    assert alive == []
    assert len(gone) == len(inside)


def test_a_process_that_is_killed_while_it_starts_sandboxes_leaves_none(needs_bubblewrap: None) -> None:
    size = (24 << 20) + 4096 * (os.getpid() % 1000)
    program = f"""
import asyncio
from orchestrator.sandbox import Limits, LocalSandbox

async def main():
    sandbox = LocalSandbox(limits=Limits(disk_bytes={size}), parallel=4, warm=4)
    await asyncio.gather(*(sandbox.run("pass") for _ in range(4)))
    print("busy", flush=True)
    await asyncio.gather(*(sandbox.run("pass") for _ in range(1000)))

asyncio.run(main())
"""
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            began = owner.stdout.readline()
            owner.kill()
        assert began == b"busy\n"
    deadline = time.monotonic() + 60
    while left := [one for one in psutil.process_iter(["cmdline"]) if str(size) in (one.info["cmdline"] or [])]:
        assert time.monotonic() < deadline, f"waited 60 s for sandboxes to end, there are {left}"
        time.sleep(0.02)


def wait_until_running(pid: int) -> list[psutil.Process]:
    """All below the owner, once Python runs in two sandboxes: the first process of each, and one program's two."""
    deadline = time.monotonic() + 60
    while True:
        children = list[psutil.Process]()
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(pid).children(recursive=True)
            if sum(child.name().startswith("python") for child in children) == 4:
                return children
        assert time.monotonic() < deadline, f"waited 60 s for four processes of Python, there are {children}"
        time.sleep(0.02)


async def test_fifty_hostile_programs_at_once_are_contained(needs_bubblewrap: None) -> None:
    kinds = [FORK_BOMB, MEMORY_IN_CHILDREN, FULL_DISK, ENDLESS_OUTPUT, "print('well')"]
    limits = Limits(
        wall_s=60.0, cpu_s=0.5, memory_bytes=96 * MIB, processes=8, output_bytes=10_000, disk_bytes=4 * MIB
    )  # fmt: skip
    async with LocalSandbox(limits=limits, parallel=50, warm=0) as sandbox:
        results = await asyncio.gather(*(sandbox.run(kinds[number % 5]) for number in range(50)))
    by_kind = [{result.limit for result in results[start::5]} for start in range(5)]
    assert by_kind[0] <= {"processes", "cpu"}
    assert by_kind[1] <= {"memory", "cpu"}
    assert by_kind[2] == {"disk"}
    assert by_kind[3] == {"output"}
    assert [result.stdout for result in results[4::5]] == [b"well\n"] * 10
