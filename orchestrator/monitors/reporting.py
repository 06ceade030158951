"""Reports to Weights & Biases, from a process of its own: nothing here waits for it, and no failure of it is ours."""

import contextlib
import importlib.util
import json
import logging
import netrc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args
from urllib.parse import urlsplit

import numpy as np
import yaml

from configs.reporting import ReportSettings
from orchestrator.episodes.records import Messages
from orchestrator.monitors.wandb_process import STEP, send
from orchestrator.samples import FinishedGroup
from transport.run import Role, RunFolder, recorded_settings

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "orchestrator.monitors.wandb_process")
QUEUE_SIZE = 1000
"""Reports that may wait for the process; what comes then is lost, and counted."""
END_TIMEOUT_S, ABORT_TIMEOUT_S = 60.0, 5.0
"""Seconds that a run waits at its end, and where it failed, for the last reports to arrive."""
DEFAULT_SERVER = "https://api.wandb.ai"
SAMPLES = "rollout/samples"
COLUMNS = ("step", "env", "prompt", "answer", "reward", "advantage", "num_tokens", "stop_reason", "version")
HIDDEN = "(hidden)"

_OVERRIDING = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_DISABLED", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR")
"""Variables that would take the place of our settings."""
_SECRET = re.compile(r"(^|[_-])(api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_USER = re.compile(r"(://)[^/@\s]+@")
"""User and password in an address."""


class Reporter(Protocol):
    """Is told what happened. Never raises, never waits, but at its end."""

    @property
    def num_lost(self) -> int:
        """Reports that have not arrived."""

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics, with its step."""

    def batch(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """A batch leaves."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over, with this summary; None where it failed. The first call counts."""


class NoReporter:
    """Nothing leaves the machine."""

    @property
    def num_lost(self) -> int:
        """Nothing is reported, so nothing can be lost."""
        return 0

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Tells nobody."""

    def batch(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """Tells nobody."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Does nothing."""


def open_reporter(settings: ReportSettings | None, run: RunFolder) -> Reporter:
    """Begins to report, where that is wanted."""
    if settings is None:
        return NoReporter()
    begin = {
        "project": settings.project,
        "name": settings.name or run.path.resolve().name,
        "run_id": run.run_id,
        "folder": str(run.path.resolve()),
        "offline": settings.offline,
        "config": config_of(run),
    }
    return WandbReporter(begin, settings)


def check_reports(settings: ReportSettings | None) -> None:
    """Raises ValueError where the environment contradicts the settings, or where reports are to be uploaded, and
    nothing says on whose behalf."""
    if settings is None:
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "report_to needs the library of Weights & Biases; pip install 'grpo[wandb]', or remove report_to"
        )
    wanted = "offline" if settings.offline else "online"
    if (mode := os.environ.get("WANDB_MODE", wanted)) != wanted:
        raise ValueError(
            f"the environment variable WANDB_MODE is {mode!r}, and report_to.offline: {str(settings.offline).lower()} "
            f"says {wanted}; unset WANDB_MODE, or change report_to.offline, or remove report_to to report nothing"
        )
    if settings.offline or _has_key():
        return
    server = urlsplit(os.environ.get("WANDB_BASE_URL", DEFAULT_SERVER)).netloc
    raise ValueError(
        f"report_to needs a key of Weights & Biases, and neither the environment variable WANDB_API_KEY nor the netrc "
        f"file has one for {server}; set WANDB_API_KEY, run `wandb login`, set report_to.offline: true, or remove "
        "report_to"
    )


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL", DEFAULT_SERVER)).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WandbReporter:
    """One run's reports: a queue, a thread that hands them on, and the process that logs and uploads them."""

    def __init__(
        self,
        begin: Mapping[str, Any],
        settings: ReportSettings,
        *,
        command: Sequence[str] = COMMAND,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        """`begin`: what the process is told first. `command`: how it is started. `end_timeout_s`: how long the run
        waits for the last reports."""
        self._end_timeout_s = end_timeout_s
        self._settings, self._folder = settings, Path(begin["folder"]) / "wandb"
        self._num_told = self._num_logged = 0
        self._warned = self._over = self._deaf = False
        self._queue: queue.Queue[Mapping[str, Any]] = queue.Queue(QUEUE_SIZE)
        self._queue.put({"begin": begin})
        self._process = _start(command)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def num_lost(self) -> int:
        """Reports that have not been logged; while the run goes on, those on their way too."""
        return self._num_told - self._num_logged

    # --- what happened ---

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """One line of metrics, with its step."""
        self._tell({"metrics": dict(metrics)})

    def batch(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """A batch leaves: its samples and distributions, where they are due."""
        if step % self._settings.interval:
            return
        report: dict[str, Any] = {}
        if self._settings.samples is not None:
            rows = sample_rows(step, groups, num=self._settings.samples)
            report["tables"] = {SAMPLES: {"columns": COLUMNS, "rows": rows}}
        if self._settings.distributions:
            report["histograms"] = distributions(groups)
        if report:
            self._tell(report | {"metrics": {STEP: step}})

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over. Waits for the last reports, but not for long."""
        if self._over:
            return
        if summary is not None:
            self._tell({"summary": dict(summary)})
        self._over = True
        deadline = time.monotonic() + (ABORT_TIMEOUT_S if summary is None else self._end_timeout_s)
        with contextlib.suppress(queue.Full):
            self._queue.put({"end": int(summary is None)}, timeout=_left_s(deadline))
        self._writer.join(_left_s(deadline))
        self._end_process(deadline)
        self._reader.join(_left_s(deadline) + ABORT_TIMEOUT_S)
        if num := self.num_lost:
            log.warning("%d of %d reports to Weights & Biases were lost", num, self._num_told)

    def _tell(self, report: Mapping[str, Any]) -> None:
        if self._over:
            return
        self._num_told += 1
        if self._deaf:
            return
        try:
            self._queue.put_nowait(report)
        except queue.Full:
            self._warn(f"{QUEUE_SIZE} reports wait already")

    def _warn(self, why: str) -> None:
        """Once: a run of many steps would say the same many times."""
        if not self._warned:
            self._warned = True
            log.warning("reports to Weights & Biases are being lost, and the run goes on without them: %s", why)

    # --- the process ---

    def _write(self) -> None:
        """Hands on what is in the queue, up to the end, or until nobody is there to read it."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                report: Mapping[str, Any] = {}
                while "end" not in report:
                    report = self._queue.get()
                    send(stdin, report)
        except OSError as error:
            self._deaf = True
            self._warn(f"its process does not listen: {error}")

    def _read(self) -> None:
        """Takes in what the process answers, until it ends."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                answer = json.loads(line)
                self._num_logged += answer.get("logged", 0)
                if "began" in answer:
                    log.info("reports to Weights & Biases: %s", answer["began"])
                elif "failed" in answer:
                    self._warn(answer["failed"])

    def _end_process(self, deadline: float) -> None:
        try:
            self._process.wait(_left_s(deadline))
        except subprocess.TimeoutExpired:
            log.warning(
                "Weights & Biases has not taken all reports in time; what is missing there is in %s, for `wandb sync`",
                self._folder,
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """In a process group of its own: it does not get the terminal's Ctrl-C, and can be ended with all it started."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name not in _OVERRIDING}
        | {"WANDB_ERROR_REPORTING": "false"},
        text=True,
        encoding="utf-8",
        process_group=0,
    )


# --- what is reported ---


def sample_rows(step: int, groups: Sequence[FinishedGroup], *, num: int) -> list[list[Any]]:
    """COLUMNS of `num` of a batch's rollouts, or of all where it has fewer, spread evenly over its groups."""
    advantages = _advantages(groups)
    every = [result for group in groups for result in group.results]
    num = min(num, len(every))
    rows = []
    for result in (every[number * len(every) // num] for number in range(num)):
        steps = [step for one in result.walk() for step in one.steps]
        answer = "\n\n".join(one.text for one in steps)
        told = (result.reward, advantages.get(result.id), result.num_tokens)
        ended = (steps[-1].completion.finish_reason, steps[-1].version) if steps else ("", None)
        rows.append([step, result.task.env, _text(result.task.messages), answer, *told, *ended])
    return rows


def distributions(groups: Sequence[FinishedGroup]) -> dict[str, list[float]]:
    """A batch's values by the name of their histogram."""
    results = [result for group in groups for result in group.results]
    return {
        "reward/distribution": [result.reward for result in results],
        "reward/advantage_distribution": list(_advantages(groups).values()),
        "rollout/num_tokens_distribution": [float(result.num_tokens) for result in results],
    }


def _advantages(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """By rollout, of those that are trained; the mean where tokens have different ones."""
    totals: dict[str, tuple[float, int]] = {}
    for sample in (sample for group in groups for sample in group.samples):
        num = int(np.count_nonzero(sample.loss_mask))
        mask, (total, others) = sample.loss_mask, totals.get(sample.rollout_id, (0.0, 0))
        total += float(np.sum(np.broadcast_to(sample.advantages, mask.shape)[mask]))
        totals[sample.rollout_id] = (total, others + num)
    return {rollout_id: total / max(num, 1) for rollout_id, (total, num) in totals.items()}


def _text(messages: Messages) -> str:
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def config_of(run: RunFolder) -> dict[str, Any]:
    """The settings of the three programs, as they are recorded, or as the launcher has written them for a program that
    records none. Without what looks like a secret."""
    config = {role: _settings_of(run, role) for role in get_args(Role)}
    return {"run_id": run.run_id} | {role: without_secrets(one) for role, one in config.items() if one is not None}


def _settings_of(run: RunFolder, role: Role) -> Any:
    if (recorded := recorded_settings(run.path, role)) is not None:
        return recorded
    try:
        return yaml.safe_load((run.path / "settings" / f"{role}.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None


def without_secrets(value: Any, key: str = "") -> Any:
    """Settings without texts under keys like `api_key`, and without passwords in addresses."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, key) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    return HIDDEN if _SECRET.search(key) else _USER.sub(rf"\1{HIDDEN}@", value)
