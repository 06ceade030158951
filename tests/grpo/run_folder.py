"""Run folders as the three programs leave them, made by hand."""

import contextlib
import io
import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.orchestrator.ledger import Ledger
from grpo.transport.records import SCHEMA_VERSION
from grpo.transport.status import StatusFile

from grpo.cli import _command

ENV = {"id": "reverse-text", "name": None, "args": {"num_train": 20}}
ORCH_SETTINGS = {"max_steps": 2, "max_off_policy_steps": 8, "env": [ENV]}


def found(folder: Path, *, programs: Mapping[str, Any] | None = None) -> Path:
    """A run that orchestrator and trainer have joined, from this process."""
    here = {"pid": os.getpid(), "host": socket.gethostname()}
    joined = {"train": {**here, "settings": {}}, "orch": {**here, "settings": ORCH_SETTINGS}}
    fields = {"run_id": "5f0c", "created": "2026-01-02T03:04:05+0000", "schema_version": SCHEMA_VERSION}
    for part in ("status", "batches", "broadcasts"):
        (folder / part).mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(fields | {"programs": joined if programs is None else programs}))
    return folder


def grpo(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The end of a `grpo` command, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = _command(list(map(str, words)))
        except SystemExit as ended:
            code = int(ended.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def says(
    folder: Path, name: str, state: str, *, pid: int | None = None, since: float | None = None, **more: Any
) -> None:
    """One program's status file; of another process, or an older one, where that is given."""
    path = folder / "status" / f"{name}.json"
    StatusFile(path).set(state, **more)
    changes = {key: value for key, value in (("pid", pid), ("since", since)) if value is not None}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def gone_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait(30)
    return process.pid


def write_ledger(folder: Path, *, close: bool = True) -> Ledger:
    """Two steps of two groups of two: groups 0 and 1 trained step 1; of group 2 one rollout was withheld, the other and
    group 3 trained step 2; group 4 could not be scored."""
    ledger = Ledger(folder / "ledger.sqlite")
    for group, (example, version) in enumerate([(5, 0), (6, 0), (5, 1), (7, 0), (8, 1)]):
        ledger.issued(group, num=2, env="reverse-text", example=example, version=version)
    for group, rewards in enumerate([(1.0, 0.0), (0.5, 0.5), (1.0, 0.25), (0.0, 0.0)]):
        for number, reward in enumerate(rewards):
            ledger.scored(f"{group}/{number}", reward=reward, num_tokens=4 + number)
    ledger.dropped(["4/0", "4/1"], "env_error")
    ledger.dropped(["2/1"], "repetition")
    for step, ids in ((1, ["0/0", "0/1", "1/0", "1/1"]), (2, ["2/0", "3/0", "3/1"])):
        ledger.shipping(ids, step, state={}, metrics={})()
        ledger.shipped(step)
        ledger.trained(step)
    ledger.changes()()
    if close:
        ledger.close()
    return ledger


def write_metrics(folder: Path, *, torn: bool = False) -> None:
    """Those of the two steps, and of an evaluation. Step 2 has 4 scored rollouts: (1 + 0.25 + 0 + 0) / 4."""
    lines = [
        {"progress/step": 0.0, "eval/accuracy": 0.5, "eval/failed": 0.0},
        {"progress/step": 1.0, "reward/mean": 0.5, "rollout/num": 4.0},
        {"progress/step": 2.0, "reward/mean": 0.3125, "rollout/num": 4.0},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n" + ('{"progress/st' if torn else "")
    (folder / "metrics.jsonl").write_text(text)


def finish(folder: Path) -> None:
    """Both programs have finished and ended, and there is a summary."""
    pid = gone_pid()
    for name in ("orch", "train"):
        says(folder, name, "finished", step=2, pid=pid)
    dropped = {"env_error": 2, "repetition": 1}
    summary = {"rollouts_issued": 10, "rollouts_trained": 7, "rollouts_dropped": dropped, "versions_served": [0, 1, 2]}
    (folder / "summary.json").write_text(json.dumps(summary))
