"""Commands of containers as processes of this machine: their volume is a folder, their names and ports are ours."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


def substituted(
    command: Sequence[str], *, volume: tuple[str, Path], names: Mapping[str, str], hosts: Sequence[str]
) -> list[str]:
    """The command with the folder for the volume, and loopback for hosts; `names` are ports and those to take."""
    program = sys.executable if command[0] == "python" else str(Path(sys.executable).with_name(command[0]))
    words = []
    for word in command[1:]:
        for host in hosts:
            word = word.replace(host, "//127.0.0.1" if host.startswith("//") else "127.0.0.1")
        for port, taken in names.items():
            word = taken if word == port else word.replace(f":{port}", f":{taken}").replace(f"={port}", f"={taken}")
            word = word.replace(f'"port": {port}', f'"port": {taken}')
        words.append(word.replace(volume[0] + "/", f"{volume[1]}/"))
    return [program, *words]


def start(stack: ExitStack, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The process, which ends with the stack."""
    file = stack.enter_context(log.open("ab"))
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
