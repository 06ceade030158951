"""Programs in sandboxes on this machine: what they get, what comes back, and what ends them."""

import asyncio
import itertools
import os
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.sandbox import Limits, LocalSandbox, SandboxError, SandboxMissing
from orchestrator.sandbox.bubblewrap import Users, users_here

LIMITS = Limits(wall_s=60.0, cpu_s=30.0)


async def test_a_program_reads_its_input_and_files_and_its_output_and_exit_code_come_back(
    sandbox: LocalSandbox,
) -> None:
    program = """
import sys
print(int(input()) + 1, open("data/numbers.txt").read(), __name__, __file__)
print("careful", file=sys.stderr)
sys.exit(3)
"""
    result = await sandbox.run(program, stdin=b"41\n", files={"data/numbers.txt": b"7"}, limits=LIMITS)
    assert (result.exit_code, result.signal, result.limit) == (3, None, None)
    assert result.stdout == b"42 7 __main__ /tmp/main.py\n"
    assert result.stderr == b"careful\n"
    assert (result.stdout_bytes, result.stderr_bytes) == (27, 8)
    assert not result.succeeded
    assert 0 < result.cpu_s < 30
    assert 0 < result.wall_s < 60


async def test_a_traceback_shows_the_program_alone(sandbox: LocalSandbox) -> None:
    result = await sandbox.run("def half(n):\n    return 1 / n\nhalf(0)\n", limits=LIMITS)
    assert result.exit_code == 1
    assert b"return 1 / n" in result.stderr
    assert b"inside.py" not in result.stderr
    assert b"ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("ending", "exit_code", "stderr"),
    [
        ("", 0, b""),
        ("exit()", 0, b""),
        ("raise SystemExit('no')", 1, b"no\n"),
        ("exit(258)", 2, b""),
        ("def", 1, b"SyntaxError"),
    ],
)
async def test_programs_end_as_under_the_interpreter(
    sandbox: LocalSandbox, ending: str, exit_code: int, stderr: bytes
) -> None:
    result = await sandbox.run(ending or "pass", limits=LIMITS)
    assert result.exit_code == exit_code
    assert stderr in result.stderr


async def test_threads_are_waited_for_and_exit_functions_are_called(sandbox: LocalSandbox) -> None:
    program = """
import atexit, threading
atexit.register(print, "end")
threading.Thread(target=lambda: print("thread")).start()
"""
    result = await sandbox.run(program, limits=LIMITS)
    assert result.stdout == b"thread\nend\n"
    assert result.exit_code == 0


async def test_a_signal_that_ends_a_program_is_told(sandbox: LocalSandbox) -> None:
    result = await sandbox.run("import os\nos.abort()", limits=LIMITS)
    assert (result.exit_code, result.signal, result.limit) == (None, 6, None)


async def test_commands_run_by_name_and_one_that_does_not_exist_is_told(sandbox: LocalSandbox) -> None:
    result = await sandbox.run(("sh", "-c", "read x; echo got $x; cat note"), stdin=b"this\n", files={"note": b"n"})
    assert (result.exit_code, result.stdout) == (0, b"got this\nn")
    missing = await sandbox.run(("no-such-command",), limits=LIMITS)
    assert missing.exit_code == 127
    assert b"no-such-command cannot be run" in missing.stderr


async def test_large_inputs_and_outputs_pass_whole(sandbox: LocalSandbox) -> None:
    data = os.urandom(3_000_000)
    program = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    result = await sandbox.run(program, stdin=data, limits=Limits(wall_s=60.0, output_bytes=3_000_000))
    assert result.stdout == data
    assert result.limit is None


async def test_an_input_that_nobody_reads_hinders_nothing(sandbox: LocalSandbox) -> None:
    result = await sandbox.run("print('done')", stdin=bytes(3_000_000), limits=LIMITS)
    assert (result.stdout, result.exit_code) == (b"done\n", 0)


async def test_packages_can_be_made_visible(needs_bubblewrap: None, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("answer = 42\n")
    tmp_path.chmod(0o755)  # noqa: ASYNC240
    async with LocalSandbox(parallel=1, warm=0, python_path=(tmp_path,)) as sandbox:
        result = await sandbox.run("import helper, decimal\nprint(helper.answer)", limits=LIMITS)
        assert result.stdout == b"42\n"


async def test_no_more_programs_run_at_once_than_asked_for(needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        program = "import time\nprint(time.monotonic_ns())\nprint(time.monotonic_ns())"
        results = await asyncio.gather(*(sandbox.run(program, limits=LIMITS) for _ in range(3)))
    spans = sorted(tuple(map(int, result.stdout.split())) for result in results)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


async def test_memory_that_processes_share_counts_once(needs_bubblewrap: None) -> None:
    program = """
import os, time
held = bytearray(b"x") * (60 << 20)
children = [os.fork() for _ in range(3)]
time.sleep(0.3)
if 0 not in children:
    print("together")
"""
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        result = await sandbox.run(program, limits=Limits(wall_s=60.0, memory_bytes=128 << 20))
    assert (result.stdout, result.limit) == (b"together\n", None)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(open_files=2**40), "open_files: 1099511627776 was asked for, at most "),
        (Limits(file_bytes=10**30), "file_bytes: 1000000000000000000000000000000 was asked for, at most "),
        (Limits(processes=2.5), "processes: 4.5 was asked for, at most "),  # type: ignore[arg-type]
    ],
)
async def test_a_limit_that_cannot_be_set_is_no_failure_of_the_program(
    sandbox: LocalSandbox, limits: Limits, named: str
) -> None:
    for program in ("print(1)", ("true",)):
        with pytest.raises(SandboxError, match=f"not run, because a limit cannot be set: {named}"):
            await sandbox.run(program, limits=limits)


async def test_a_program_cannot_claim_that_its_limits_were_not_set(sandbox: LocalSandbox) -> None:
    result = await sandbox.run("import os\nos.write(3, b'-no')\nos.write(3, b'-no')\nexit(1)", limits=LIMITS)
    assert (result.exit_code, result.limit) == (1, None)


async def test_a_program_may_have_more_memory_than_the_process_that_has_it_run(needs_bubblewrap: None) -> None:
    program = """
import asyncio
from orchestrator.sandbox import Limits, LocalSandbox
from orchestrator.workers.child import limit_memory

async def main():
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        return await sandbox.run("print(len(bytearray(400 << 20)))", limits=Limits(wall_s=60.0, memory_bytes=2 << 30))

limit_memory(1 << 28)
print(asyncio.run(main()))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    stdout, _ = await process.communicate()
    assert b"stdout=b'419430400\\n'" in stdout


async def test_an_input_is_made_when_it_is_the_programs_turn(needs_bubblewrap: None) -> None:
    ended: list[int] = []

    async def one(number: int) -> bytes:
        result = await sandbox.run("print(input())", stdin=lambda: f"after {len(ended)}".encode(), limits=LIMITS)
        ended.append(number)
        return result.stdout

    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        told = await asyncio.gather(*map(one, range(3)))
    assert sorted(told) == [b"after 0\n", b"after 1\n", b"after 2\n"]


async def test_a_run_that_is_cancelled_leaves_no_process(needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=0) as sandbox:
        run = asyncio.create_task(sandbox.run("import time\ntime.sleep(1000)", limits=Limits(wall_s=1000.0)))
        while not any("bwrap" in child.name() for child in psutil.Process().children()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert sandboxes() == []
        assert (await sandbox.run("print(1)", limits=LIMITS)).stdout == b"1\n"


async def test_closing_ends_the_sandboxes_that_wait(needs_bubblewrap: None) -> None:
    sandbox = LocalSandbox(parallel=1, warm=2)
    await sandbox.start()
    await sandbox.close()
    assert sandboxes() == []
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("print(1)")


async def test_sandboxes_that_are_ended_while_they_start_leave_nothing(needs_bubblewrap: None) -> None:
    size = (16 << 20) + 4096 * (os.getpid() % 1000)
    for moment in range(20):
        sandbox = LocalSandbox(limits=Limits(disk_bytes=size), parallel=4, warm=4)
        await sandbox.start()
        for _ in range(moment):
            await asyncio.sleep(0)
        await sandbox.close()
    assert [
        process for process in psutil.process_iter(["cmdline"]) if str(size) in (process.info["cmdline"] or [])
    ] == []


async def test_a_sandbox_that_died_while_it_waited_is_replaced(needs_bubblewrap: None) -> None:
    async with LocalSandbox(parallel=1, warm=1) as sandbox:
        await asyncio.gather(*sandbox._starting)
        waiting = sandboxes()
        assert waiting
        for process in waiting:
            process.kill()
        psutil.wait_procs(waiting, timeout=60)
        assert (await sandbox.run("print(1)", limits=LIMITS)).stdout == b"1\n"


async def test_other_disk_sizes_are_honoured(sandbox: LocalSandbox) -> None:
    program = "import os\nroom = os.statvfs('/tmp')\nprint(room.f_blocks * room.f_frsize)"
    for size in (1 << 20, 64 << 20):
        result = await sandbox.run(program, limits=Limits(wall_s=60.0, disk_bytes=size))
        assert int(result.stdout) == size


async def test_without_bubblewrap_nothing_is_run_and_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxMissing, match="apt-get install bubblewrap"):
        await LocalSandbox().run("print(1)")


async def test_programs_that_come_together_wait_for_one_trial(needs_bubblewrap: None) -> None:
    trials = []

    class Watched(LocalSandbox):
        async def _prove(self) -> None:
            trials.append(self._proven)
            await super()._prove()

    async with asyncio.timeout(120):
        sandbox = Watched(parallel=2, warm=0)
        await asyncio.gather(*(sandbox.run("print(1)", limits=LIMITS) for _ in range(3)))
        await sandbox.close()
    assert trials == [False]


async def test_where_bubblewrap_makes_no_sandbox_its_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxMissing, match=r"No permissions to create a new namespace\. .*max_user_namespaces"):
        await LocalSandbox().run("print(1)")


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel exempts root alone from its count of processes")
async def test_a_sandbox_that_would_not_hold_a_fork_bomb_is_refused(needs_bubblewrap: None) -> None:
    sandbox = LocalSandbox()
    sandbox.users = Users(-1, 1)
    with pytest.raises(SandboxMissing, match="does not count the processes"):
        await sandbox.run("print(1)")
    assert sandboxes() == []


@pytest.mark.parametrize(
    ("program", "files", "message"),
    [
        ("", {}, "no program"),
        ((), {}, "no program"),
        ("print('\0')", {}, "zero bytes"),
        ("print()", {"../x": b""}, "no place in the sandbox"),
        ("print()", {"/etc/passwd": b""}, "no place in the sandbox"),
        ("print()", {"x" * 256: b""}, "longer than 255 bytes"),
        ("print()", {"a/b": b"", "a": b""}, "'a' and 'a/b' exclude each other"),
        ("print()", {"main.py": b""}, "the program's own name"),
        ("print()", {"large": bytes(65 << 20)}, "68157440 bytes, the sandbox's disk 67108864"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_its_reason(
    program: str | tuple[str, ...], files: dict[str, bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await LocalSandbox().run(program, files=files)


def test_limits_too_small_to_run_anything_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Limits\(memory_bytes=1024\) is too small: at least 67108864"):
        Limits(memory_bytes=1024)
    with pytest.raises(ValueError, match="parallel=0"):
        LocalSandbox(parallel=0)


@pytest.mark.parametrize(
    ("user", "id_map", "first"),
    [
        (1000, "0 0 4294967295", -1),
        (0, "0 1000 1", -1),
        (0, "0 0 4294967295", 0x70000000),
        (0, "0 1000 1\n1 100000 65536", 65537 - 4096),
    ],
)
def test_roots_programs_become_users_of_their_own_where_there_are_enough(user: int, id_map: str, first: int) -> None:
    users = users_here(user, id_map)
    assert users.first == first
    assert users.namespaces == (first < 0)
    numbers = users.numbers()
    seen = {next(numbers) for _ in range(3)}
    assert all(users.first <= number < users.first + users.how_many for number in seen)


def sandboxes() -> list[psutil.Process]:
    """What is left of this process's sandboxes."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() == "bwrap" or "inside.py" in " ".join(child.cmdline())]


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's programs read what that user may read")
def test_packages_that_programs_could_not_read_are_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ValueError, match=r"chmod -R o\+rX"):
        LocalSandbox(python_path=(tmp_path,))
