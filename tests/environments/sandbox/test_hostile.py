"""Hostile programs: each is contained, and the machine is as before."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import MIB, Limits

from tests.support import until

pytestmark = pytest.mark.chaos

LIMITS = Limits(
    wall_s=200.0, cpu_s=1.0, memory_bytes=128 * MIB, processes=8, output_bytes=100_000,
    disk_bytes=8 * MIB, num_files=200,
)  # fmt: skip
ENOUGH = Limits(wall_s=60.0)

FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
FULL_DISK = "for name in range(100):\n    with open(f'/tmp/{name}', 'wb') as file:\n        file.write(bytes(1 << 20))"
MEMORY_IN_CHILDREN = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(b"x") * (60 << 20)
        time.sleep(100)
time.sleep(100)
"""
EXCEEDS = {
    "fork_bomb": (FORK_BOMB, "processes cpu"),
    "zombies": (
        "import os, time\ntry:\n    while True:\n        if os.fork() == 0:\n            os._exit(0)\n"
        "except OSError:\n    time.sleep(1000)",
        "processes",
    ),
    "memory": ("held = bytearray(1 << 30)", "None"),
    "memory_in_children": (MEMORY_IN_CHILDREN, "memory cpu"),  # a slow machine takes a second to fill it
    "shared_memory": (
        "import mmap\nheld = []\nwhile True:\n    held += [mmap.mmap(-1, 1 << 20)]\n    held[-1].write(bytes(1 << 20))",
        "memory None",
    ),
    "large_file": ("with open('large', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 16))", "None"),
    "full_disk": (FULL_DISK, "None"),
    "many_files": ("number = 0\nwhile True:\n    number += 1\n    open(str(number), 'w').close()", "files"),
    "endless_output": ("while True:\n    print('x' * 1000)", "output"),
    "loops_in_children": ("import os\nfor _ in range(2):\n    os.fork()\nwhile True:\n    pass", "cpu"),
}
NEVER_ENDS = {
    "ignores_signals": """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
time.sleep(1000)
""",
    "stops": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}
CONTAINED = {
    "processes_left_behind_end_with_the_program": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nprint('parent ends')",
        "parent ends\n",
    ),
    "no_socket_reaches_out": (
        """
import socket
for family in (socket.AF_VSOCK, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_ALG, 31):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            print(socket.socket(family, kind, 0))
        except PermissionError:
            pass
a, b = socket.socketpair()
a.send(b"own")
print(b.recv(3))
""",
        "b'own'\n",
    ),
    "the_system_cannot_be_written": (
        """
import os
for path in ("/x", "/usr/x", "/usr/bin/x", "/dev/x", "/proc/sys/kernel/hostname", "/etc/x", __file__, os.__file__):
    try:
        open(path, "a").write("x")
        print("WROTE", path)
    except OSError:
        pass
for folder in ("/tmp", "/dev/shm"):
    open(folder + "/x", "w").write("x")
""",
        "",
    ),
    "no_rights_and_none_to_get": (
        """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(*({int(status[key], 16) for key in ("CapPrm", "CapEff", "CapAmb", "CapInh")}), os.getuid() != 0,
      *(status[key].strip() for key in ("NoNewPrivs", "Seccomp")))
libc = ctypes.CDLL(None, use_errno=True)
for name, *arguments in [("unshare", 0x10000000), ("mount", b"x", b"/tmp", b"tmpfs", 0, None), ("ptrace", 16, 1, 0, 0),
                         ("chroot", b"/tmp"), ("memfd_create", b"x", 0), ("keyctl", 0), ("setns", 0, 0), ("setuid", 0),
                         ("syscall", 425, 8, 0), ("syscall", 321, 0, 0, 0), ("syscall", 56, 0x10000011, 0, 0, 0, 0)]:
    if hasattr(libc, name) and getattr(libc, name)(*arguments) != -1:
        print("DID", name)
""",
        "0 True 1 2\n",
    ),
    "foreign_system_calls_kill": (
        """
import ctypes, os
if os.fork() == 0:
    ctypes.CDLL(None).syscall(0x40000000 | 39)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
        "-31\n",
    ),
    "nothing_of_ours_is_open": (
        "import os\nprint({os.readlink(f'/proc/self/fd/{fd}').split(':')[0] for fd in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{fd}')})",
        None,
    ),
}


@pytest.fixture(autouse=True)
def machine_unharmed(needs_bubblewrap: None) -> Iterator[None]:
    """After each test no process of a sandbox is left. Other tests may have left processes of their own."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [child.name() for child in psutil.Process().children(recursive=True) if child not in before] == []
    assert subprocess.run([sys.executable, "-c", "print(1)"], check=True, capture_output=True).stdout == b"1\n"


async def run(program: str) -> str:
    return (await LocalSandbox(parallel=1).run(program, limits=ENOUGH)).stdout.decode()


@pytest.mark.parametrize("name", EXCEEDS)
async def test_each_limit_is_kept(name: str) -> None:
    """None: the kernel refuses the program what is too much, and it fails of itself."""
    program, limits = EXCEEDS[name]
    result = await LocalSandbox(limits=LIMITS, parallel=1).run(program)
    assert str(result.limit) in limits.split()
    assert not result.succeeded
    assert max(len(result.stdout), len(result.stderr)) <= LIMITS.output_bytes


@pytest.mark.parametrize("name", NEVER_ENDS)
async def test_what_does_not_end_is_ended_by_the_clock(name: str) -> None:
    result = await LocalSandbox(parallel=1).run(NEVER_ENDS[name], limits=Limits(wall_s=1.0))
    assert (result.limit, result.exit_code) == ("wall", 137)


@pytest.mark.parametrize("name", CONTAINED)
async def test_programs_are_contained(name: str) -> None:
    program, expected = CONTAINED[name]
    result = await LocalSandbox(parallel=1).run(program, limits=ENOUGH)
    assert result.limit is None
    if expected is None:
        assert set(result.stdout.decode().strip("{}\n").replace("'", "").split(", ")) <= {"/memfd", "pipe"}
    else:
        assert result.stdout.decode() == expected, result


async def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket
for address in ("127.0.0.1", "192.0.2.1"):
    try:
        socket.create_connection((address, {server.getsockname()[1]}), timeout=5)
    except OSError as error:
        print(type(error).__name__)
"""
        assert await run(program) == "ConnectionRefusedError\nOSError\n"


async def test_the_host_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("the secret")
    monkeypatch.setenv("SECRET_KEY", "the secret")
    program = f"""
import os
print(*os.listdir("/"))
print(os.listdir("/tmp"), *(name for name in sorted(os.listdir("/proc")) if name.isdigit()))
print(*os.environ, *os.environ.values())
for path in ({str(tmp_path / "secret.txt")!r}, "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/1/mem",
             "/proc/1/root/etc/passwd", "/proc/{os.getpid()}/environ", "/sys/class/net", {__file__!r}, "/proc/kcore"):
    try:
        print("READ", path, open(path, "rb").read(10))
    except OSError:
        pass
"""
    roots, rest, environment, *read = (await run(program)).splitlines()
    assert not {"home", "work", "sys", "var", "run", "boot", "mnt", "opt"} & set(roots.split())
    assert rest == "[] 1 2"
    assert "secret" not in environment.lower()
    assert [line for line in read if os.geteuid() == 0 or "/proc/1/" not in line] == []


async def test_signals_reach_no_process_outside() -> None:
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
print("still here", flush=True)
os.kill(-1, signal.SIGKILL)
"""
        assert await run(program) == "still here\n"
        assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=60)


OWNER = """
import asyncio
from grpo.environments.sandbox.local import LocalSandbox
from grpo.environments.sandbox.records import Limits

async def main():
    sandbox = LocalSandbox(limits=Limits(disk_bytes={size}, wall_s=1000), parallel=4)
    await asyncio.gather(*(sandbox.run("pass") for _ in range(2)))
    print("busy", flush=True)
    await asyncio.gather(*(sandbox.run({program!r}) for _ in range(1000)))

asyncio.run(main())
"""


@pytest.mark.parametrize("program", ["import os, time\nos.fork()\ntime.sleep(1000)", "pass"])
def test_sandboxes_end_with_the_process_that_started_them_however_it_ends(program: str) -> None:
    """While they run, and while they start, of which there are many moments."""
    size = (24 << 20) + 4096 * (os.getpid() % 1000)
    source = OWNER.format(size=size, program=program)
    for pause_s in (0.0, 0.05):
        with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"busy\n"
            time.sleep(pause_s)
            owner.kill()
    until(lambda: not any(str(size) in (one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])))
