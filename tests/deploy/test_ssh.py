"""`grpo launch RUN --on ssh:HOST`, by a real sshd on this machine."""

import getpass
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpo.deploy.ssh import host_of
from grpo.transport.errors import UserError
from grpo.transport.ports import free_port

from tests.e2e.runs import PROGRAMS, ROOT
from tests.grpo.run_folder import grpo
from tests.support import until, until_gone

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="there is no sshd here: apt-get install openssh-server"
)
PROGRAM = """\
#!/bin/sh
# A grpo that settles whether its settings are right, runs until it is told to end, and has a status. $0 is in a folder
# grpo-stand-in.
case "$*" in
*--dry-run*) case "$*" in *bad*) echo "error: bad" >&2; exit 2;; esac; exit 0;;
status*) state=$(cat ../run/state); echo "run 5f0c in ../run: $state"
    case "$state" in finished) exit 0;; stopped) exit 4;; *) exit 3;; esac;;
esac
mkdir -p ../run
echo '{}' > ../run/run.json
echo "$*" > ../run/words
echo "$WANDB_API_KEY" > ../run/key
cat run.yaml > ../run/settings 2>/dev/null
echo running > ../run/state
trap 'echo stopped > ../run/state; exit 143' TERM
while [ ! -f ../run/end ]; do sleep 0.05; done
echo finished > ../run/state
"""


@dataclass
class Machine:
    """What ssh reaches, and where its runs are."""

    folder: Path
    words: list[str]

    def launch(self, run: str | Path, *words: str) -> "subprocess.CompletedProcess[str]":
        return grpo("launch", run, "--on", f"ssh:{getpass.getuser()}@127.0.0.1", *self.words, *words)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options of ssh for a daemon of this user's own."""
    folder, port = tmp_path_factory.mktemp("sshd"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    known = subprocess.run(["cat", str(folder / "host.pub")], capture_output=True, text=True, check=True).stdout
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {known}")
    assert SSHD is not None
    log = (folder / "log").open("wb")
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=log)
    options = ["-F", "none", "-p", str(port), "-i", f"{folder}/user", "-o", f"UserKnownHostsFile={folder}/known_hosts"]

    def answers() -> bool:
        assert daemon.poll() is None, (folder / "log").read_text()
        return subprocess.run(["ssh", *options, "-o", "BatchMode=yes", "127.0.0.1", "true"]).returncode == 0

    try:
        until(answers, log=lambda: (folder / "log").read_text())
        yield options
    finally:
        daemon.terminate()
        daemon.wait(30)
        log.close()


@pytest.fixture
def machine(sshd: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One with a stand-in for grpo, whose runs end where a file says so."""
    program = tmp_path / "grpo-stand-in/program"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    there = tmp_path / "its runs"
    ssh = {"folder": str(there), "command": str(program), "options": sshd}
    monkeypatch.setenv("WANDB_API_KEY", "it's secret")
    made = Machine(there / "quickstart", ["--topology.ssh", json.dumps(ssh)])
    yield made
    for file in there.glob("*/launch.pid"):
        try:
            os.kill(int(file.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            continue


def state(machine: Machine, expected: str) -> None:
    file = machine.folder / "run/state"
    until(lambda: file.exists() and file.read_text() == f"{expected}\n", log=lambda: str(machine.folder))


def test_a_run_is_started_shown_ended_and_gone_on_with(machine: Machine) -> None:
    started = machine.launch("quickstart", "--max_steps", "7", "--output_dir", "outputs/quickstart")
    assert (started.returncode, started.stderr) == (0, "")
    state(machine, "running")
    words = shlex.split((machine.folder / "run/words").read_text())
    assert words[:1] == ["quickstart"]
    assert words[-4:] == ["--max_steps", "7", "--output_dir", "../run"]
    assert (machine.folder / "run/key").read_text() == "it's secret\n"
    shown = machine.launch("quickstart")
    assert shown.stdout.splitlines()[0] == "run 5f0c in ../run: running"
    pid = (machine.folder / "launch.pid").read_text()
    assert machine.launch("quickstart", "--stop").returncode == 0
    state(machine, "stopped")
    assert "nothing ran" in machine.launch("quickstart", "--stop").stdout
    assert machine.launch("quickstart").returncode == 0
    state(machine, "running")
    assert (machine.folder / "launch.pid").read_text() != pid
    (machine.folder / "run/end").touch()
    state(machine, "finished")
    until(lambda: "rsync -a" in machine.launch("quickstart").stdout, log=lambda: str(machine.folder))


def test_the_folder_of_a_run_of_ones_own_is_copied_without_what_a_run_does_not_read(
    machine: Machine, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    (mine / "outputs").mkdir(parents=True)
    (mine / "outputs/large").touch()
    (mine / ".env").write_text("KEY=1")
    (mine / "my_env.py").write_text("x = 1")
    text = (ROOT / "configs/quickstart/run.yaml").read_text().replace("model: model", "model: me/model")
    (mine / "run.yaml").write_text(text)
    assert machine.launch(mine).stderr == ""
    state(machine, "running")
    assert sorted(path.name for path in (machine.folder / "files").iterdir()) == ["my_env.py", "run.yaml"]
    assert (machine.folder / "run/settings").read_text() == text
    machine.launch(mine, "--stop")


def test_what_the_machine_refuses_is_told_and_nothing_is_started(machine: Machine) -> None:
    refused = machine.launch("quickstart", "--output_dir", "quickstart", "--name", "bad")
    assert refused.returncode != 0
    machine.words += ["--topology.ssh.command", "no-such-grpo"]
    missing = machine.launch("quickstart")
    assert (missing.returncode, "topology.ssh.command" in missing.stderr) == (1, True)
    assert not (machine.folder / "launch.pid").exists()


def test_no_key_is_in_what_is_printed_and_no_host_is_an_option(machine: Machine) -> None:
    assert "secret" not in machine.launch("quickstart", "--dry-run").stdout
    for host in ("ssh:-oProxyCommand=touch x", "ssh:", "ssh:a b", "ssh:$(x)"):
        with pytest.raises(UserError, match="ssh:HOST"):
            host_of(host)


@pytest.mark.e2e
def test_a_real_run_begins_there_and_is_ended(sshd: list[str], tmp_path: Path) -> None:
    ssh = {"folder": str(tmp_path), "command": str(PROGRAMS / "grpo"), "options": sshd}
    machine = Machine(tmp_path / "quickstart", ["--topology.ssh", json.dumps(ssh), "--device", "cpu"])
    words = ["--orch.batch_size", "64", "--orch.eval.num_examples", "0"]
    assert machine.launch("quickstart", *words).stderr == ""
    log = machine.folder / "launch.log"
    until((machine.folder / "run/status/train.json").exists, log=log.read_text)
    assert "grpo-train" in machine.launch("quickstart", *words).stdout
    pid = int((machine.folder / "launch.pid").read_text())
    assert machine.launch("quickstart", "--stop").returncode == 0
    until_gone([pid])
