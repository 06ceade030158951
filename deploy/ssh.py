"""A run on one machine that ssh reaches, as a rented one with GPUs: `grpo` itself there, which goes on without us.

Everything that the machine is told goes to the standard input of `sh` there: keys are in no command line.
"""

import io
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from grpo.configs.run import LoadedRun, run_file
from grpo.deploy.cluster import name_of, preset_of
from grpo.transport.errors import UserError
from grpo.transport.hidden import key_variables
from grpo.transport.status import FINISHED

ANSWER_S = 600.0
"""Longest time that the machine may take to answer."""
MAX_BYTES = 100_000_000
"""Size of the folder with the run's file, which is copied."""
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_HOST = re.compile(r"[A-Za-z0-9_][\w.@:%\[\]-]*")
_HELPERS = """\
alive() {
    [ -f launch.pid ] && read -r pid < launch.pid && tr '\\0' ' ' < "/proc/$pid/cmdline" 2>/dev/null | grep -q grpo
}
"""


def host_of(on: str) -> str:
    """Returns HOST of `ssh:HOST`. Raises UserError for what is none."""
    host = on.removeprefix("ssh:")
    if not _HOST.fullmatch(host):
        raise UserError(f"--on {on}: expected ssh:HOST, with a name of ~/.ssh/config or USER@ADDRESS")
    return host


def script(run: LoadedRun, target: str, arguments: Sequence[str]) -> str:
    """Returns what the machine is told to start a run, without the keys. Its settings are checked there first, where
    its GPUs are."""
    folder, words = _folder(run), _words(run, target, arguments)
    return f"""\
set -eu
umask 077
mkdir -p {folder}/files
cd {folder}
{_HELPERS}alive && {{ echo it is running already; exit 0; }}
cd files
{words} --dry-run > /dev/null
setsid nohup {words} >> ../launch.log 2>&1 < /dev/null &
echo $! > ../launch.pid
"""


def _words(run: LoadedRun, target: str, arguments: Sequence[str]) -> str:
    """Returns the command, whose run's folder is beside the folder of files in which it is given."""
    kept, given = list[str](), iter(arguments)
    for word in given:
        if word == "--output_dir":
            next(given, None)
        elif not word.startswith("--output_dir="):
            kept.append(word)
    source = preset_of(target) or run_file(target).name
    return f"{_program(run)} {shlex.join([source, *kept, '--output_dir', '../run'])}"


def _program(run: LoadedRun) -> str:
    return shlex.join(shlex.split(run.settings.topology.ssh.command))


def _folder(run: LoadedRun) -> str:
    """Returns the folder of the run on the machine, for a shell; without a slash at its beginning it is in the home."""
    return shlex.quote(f"{run.settings.topology.ssh.folder}/{name_of(run)}")


# --- on the machine ---


def submit(run: LoadedRun, host: str, target: str, arguments: Sequence[str]) -> str:
    """Copies the folder with the run's file, starts the run, and says so. Raises UserError and OSError."""
    if preset_of(target) is None:
        where = _folder(run)
        _ssh(
            run,
            host,
            f"umask 077; mkdir -p {where}/files && tar -C {where}/files -xf -",
            _packed(run_file(target).parent),
        )
    names = sorted(name for name in key_variables(run.orch.settings.model_dump()) if os.environ.get(name))
    keys = "".join(f"export {name}={shlex.quote(os.environ[name])}\n" for name in names)
    said = _ssh(run, host, "sh -s", (keys + script(run, target, arguments)).encode())
    place = f"{host}:{run.settings.topology.ssh.folder}/{name_of(run)}"
    return said or f"started on {host}; its log is {place}/launch.log; the same command shows how it stands"


def _packed(folder: Path) -> bytes:
    """Returns a tar file of a folder without outputs, hidden files and what Python compiled."""

    def chosen(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = Path(entry.name).parts
        left_out = any(one.startswith(".") or one in ("outputs", "__pycache__") for one in parts)
        return None if left_out else entry

    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=chosen)
            if files.tell() > MAX_BYTES:
                raise UserError(f"{folder} holds more than {MAX_BYTES:,} bytes; put run.yaml into a folder of its own")
    return files.getvalue()


def state(run: LoadedRun, host: str) -> str | None:
    """Returns how the run stands; None where it is to be started: there is none, or it has ended before its end. Raises
    OSError."""
    said = _ssh(
        run,
        host,
        "sh -s",
        f"""\
cd {_folder(run)} 2>/dev/null && [ -f run/run.json ] || exit 0
{_HELPERS}alive && echo alive || echo ended
cd files
{_program(run)} status ../run || [ $? -le 4 ]  # by the run's state
""".encode(),
    )
    first, _, about = said.partition("\n")
    if first == "alive":
        return about
    if not about.partition("\n")[0].endswith(f": {FINISHED}"):
        return None
    place = f"{host}:{run.settings.topology.ssh.folder}/{name_of(run)}/run/"
    return f"{about}\n\ncopy it here: {shlex.join(['rsync', '-a', place, f'{run.train.settings.output_dir}/'])}"


def stop(run: LoadedRun, host: str) -> str:
    """Ends what runs; the folder stays. SIGINT would not: a shell starts what it does not wait for with that ignored.
    Raises OSError."""
    said = _ssh(
        run,
        host,
        "sh -s",
        f"""\
cd {_folder(run)} 2>/dev/null || exit 0
{_HELPERS}alive || exit 0
kill -TERM "$pid"
for _ in $(seq 120); do alive || {{ echo ended; exit 0; }}; sleep 0.5; done
echo "process $pid has not ended within 60 s" >&2
exit 1
""".encode(),
    )
    return f"{said or 'nothing ran'} on {host}; the same command without --stop goes on with it"


def _ssh(run: LoadedRun, host: str, command: str, given: bytes) -> str:
    """Returns what a command there prints. Raises OSError with what it or ssh says where it fails."""
    words = ["ssh", *_OPTIONS, *run.settings.topology.ssh.options, "--", host, command]
    try:
        done = subprocess.run(words, input=given, capture_output=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise OSError("there is no ssh here; install OpenSSH's client, or see --dry-run") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"{host} has not answered within {ANSWER_S:g} s; see whether the machine is up") from None
    if done.returncode == 127:
        program = run.settings.topology.ssh.command
        raise OSError(f"{host} has no {program}; install grpo there, or give its path as topology.ssh.command")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise OSError(f"{host}: {said}")
    return done.stdout.decode(errors="replace").strip()
