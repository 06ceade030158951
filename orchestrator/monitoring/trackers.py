"""Reports to experiment trackers: a thread hands them on, so that the run waits for none and no failure is its own."""

import contextlib
import logging
import netrc
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args
from urllib.parse import urlsplit

import numpy as np
import psutil
import yaml
from grpo.configs.reporting import TRACKER_EXTRAS, ReportSettings, TrackerName
from grpo.orchestrator.monitoring.metrics import STEP
from grpo.orchestrator.monitoring.samples import COLUMNS, SAMPLES, Rollouts, rollouts_of
from grpo.orchestrator.monitoring.timeline import TIMELINE_FILE
from grpo.orchestrator.samples import ScoredGroup
from grpo.transport.extras import check_installed
from grpo.transport.hidden import key_variables
from grpo.transport.run import Role, RunFolder, recorded_settings

log = logging.getLogger(__name__)

QUEUE_SIZE = 1000
"""Reports that may wait for the thread; what comes then is lost, and counted."""
END_TIMEOUT_S, ABORT_TIMEOUT_S = 60.0, 5.0
"""Seconds that a run waits at its end, and where it failed, for the last reports to arrive."""

KNOWN_TEXTS = frozenset(
    """
    device dtype format id importance lora_target_modules lr_scheduler_type max_tokens_field model name
    optimizer ratio_type recipe resume role run_id select sources teacher to type weight_broadcast_type
    """.split()  # noqa: SIM905
)
"""Text settings that are reported. Of other settings only numbers and switches are; of free-form mappings nothing."""
_FREE = frozenset({"args", "env_args", "extra", "kwargs"})


_Line = tuple[int, Mapping[str, float]]


class Tracker(Protocol):
    """One library, opened for one run. Any method may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics."""

    def log_rollouts(self, rollouts: Rollouts) -> None:
        """Takes texts and distributions of a step."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over; without a summary where it failed. Waits until all is written and uploaded."""


class Wandb:
    """Weights & Biases, without anything about the machine."""

    def __init__(self, run: RunFolder, settings: ReportSettings) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=settings.project,
            name=settings.name or run.path.resolve().name,
            id=run.run_id,
            resume="allow",
            dir=str(run.path.resolve()),
            mode="offline" if settings.offline else "online",
            config=config_of(run),
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, save_code=False, disable_git=True, x_disable_meta=True,
                x_disable_machine_info=True, x_disable_stats=True, x_save_requirements=False,
            ),
        )  # fmt: skip
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics."""
        self._run.log({**metrics, STEP: step})

    def log_rollouts(self, rollouts: Rollouts) -> None:
        """Takes texts as a table, and distributions as histograms."""
        logged: dict[str, Any] = {STEP: rollouts.step}
        if rollouts.samples:
            logged[SAMPLES] = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rollouts.samples])
        logged |= {key: self._wandb.Histogram(list(values)) for key, values in rollouts.distributions.items() if values}
        self._run.log(logged)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Ends the library's own process, too."""
        self._run.summary.update(dict(summary or {}))
        self._run.finish(exit_code=int(summary is None))
        self._wandb.teardown(int(summary is None))


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, run: RunFolder, settings: ReportSettings) -> None:
        from tensorboardX import SummaryWriter  # type: ignore[import-untyped, unused-ignore]

        self._writer = SummaryWriter(str(run.path / "tensorboard"), write_to_disk=True)
        self._writer.add_text("config", f"```\n{yaml.safe_dump(config_of(run))}```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_rollouts(self, rollouts: Rollouts) -> None:
        """Takes texts as a table of Markdown, and distributions as histograms."""
        if rollouts.samples:
            cells = [[_cell(one) for one in row] for row in (COLUMNS, ["---"] * len(COLUMNS), *rollouts.samples)]
            table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
            self._writer.add_text(SAMPLES, table, rollouts.step)
        for key, values in rollouts.distributions.items():
            if values:
                self._writer.add_histogram(key, np.asarray(values), rollouts.step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Closes the file."""
        self._writer.close()


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


Makers = Mapping[TrackerName, Callable[[RunFolder, ReportSettings, int], Tracker]]
"""They also get how many bytes the run's timeline had when this process began to report."""


def _wandb(run: RunFolder, settings: ReportSettings, _: int) -> Tracker:
    return Wandb(run, settings)


def _tensorboard(run: RunFolder, settings: ReportSettings, _: int) -> Tracker:
    return TensorBoard(run, settings)


def _otlp(run: RunFolder, settings: ReportSettings, num_old_bytes: int) -> Tracker:
    from grpo.orchestrator.monitoring.telemetry import Otlp

    return Otlp(run, settings, num_old_bytes)


def _prometheus(run: RunFolder, settings: ReportSettings, _: int) -> Tracker:
    from grpo.orchestrator.monitoring.telemetry import Prometheus

    return Prometheus(run, settings)


TRACKERS: Makers = {"wandb": _wandb, "tensorboard": _tensorboard, "otlp": _otlp, "prometheus": _prometheus}


class Reporter:
    """Tells a run's trackers what happened, from a thread. Never raises, and never waits but at its end."""

    def __init__(self, run: RunFolder | None, settings: ReportSettings | None, *, trackers: Makers = TRACKERS) -> None:
        """Without `settings` nothing leaves the machine."""
        self._run, self._settings, self._makers = run, settings, trackers
        self._queue: queue.Queue[_Line | Rollouts | Mapping[str, Any] | None] = queue.Queue(QUEUE_SIZE)
        self._num_reports = self._num_logged = 0
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
        timeline = None if run is None else run.path / TIMELINE_FILE
        self._num_old_bytes = 0 if timeline is None or not timeline.exists() else timeline.stat().st_size
        self._over = run is None or settings is None
        if not self._over:
            self._thread.start()

    @property
    def num_lost(self) -> int:
        """Reports that not every tracker has taken; while the run goes on, those on their way too."""
        return self._num_reports - self._num_logged

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Takes one line of metrics, with its step."""
        self._tell((int(metrics[STEP]), dict(metrics)))

    def batch(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """A batch leaves: takes texts and distributions of its rollouts, where they are due."""
        if self._over or self._settings is None or self._run is None:
            return
        with self._warned_of("rollouts"):
            names = key_variables(recorded_settings(self._run.path, "orch"))
            if (rollouts := rollouts_of(step, groups, self._settings, key_names=names)) is not None:
                self._tell(rollouts)

    def _tell(self, report: "_Line | Rollouts") -> None:
        if self._over:
            return
        self._num_reports += 1
        try:
            self._queue.put_nowait(report)
        except queue.Full:
            self._warn(f"{QUEUE_SIZE} reports wait already")

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is over, with this summary; None where it failed. Waits for the last reports, but not for long. The
        first call counts."""
        if self._over:
            return
        self._over = True
        timeout_s = ABORT_TIMEOUT_S if summary is None else END_TIMEOUT_S
        with contextlib.suppress(queue.Full):
            self._queue.put(summary, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("trackers have not taken all reports within %g s; for W&B, see `wandb sync`", timeout_s)
            for child in psutil.Process().children():  # for which the interpreter's end would wait
                if child.name() == "wandb-core":
                    child.kill()
        if num := self.num_lost:
            log.warning("%d of %d reports to trackers were lost", num, self._num_reports)

    def _warn(self, why: str) -> None:
        """Once: a run of many steps would say the same many times."""
        if not self._warned:
            self._warned = True
            log.warning("reports to trackers are being lost, and the run goes on without them: %s", why)

    def _work(self) -> None:
        """Hands on what is in the queue, up to the end."""
        assert self._run is not None
        assert self._settings is not None
        trackers: dict[TrackerName, Tracker] = {}
        for name in self._settings.to:
            with self._warned_of(name):
                trackers[name] = self._makers[name](self._run, self._settings, self._num_old_bytes)
        while isinstance(report := self._queue.get(), tuple | Rollouts):
            num_taken = 0
            for name, tracker in trackers.items():
                with self._warned_of(name):
                    tracker.log_rollouts(report) if isinstance(report, Rollouts) else tracker.log(*report)
                    num_taken += 1
            self._num_logged += num_taken == len(self._settings.to)
        for name, tracker in trackers.items():
            with self._warned_of(name):
                tracker.finish(report)

    @contextlib.contextmanager
    def _warned_of(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._warn(f"{name}: {type(error).__name__}: {error}")


def check_reports(settings: ReportSettings | None) -> None:
    """Raises ValueError where a tracker is not installed, or where reports are to be uploaded and nothing says on whose
    behalf."""
    if settings is None:
        return
    for name in settings.to:
        check_installed(TRACKER_EXTRAS[name], f"report_to: {name}")
    protocols = {os.environ.get(f"OTEL_EXPORTER_OTLP{of}_PROTOCOL") for of in ("", "_TRACES", "_METRICS")}
    if "otlp" in settings.to and (others := protocols - {None, "", "http/protobuf"}):
        raise ValueError(
            f"report_to: otlp speaks http/protobuf, and OTEL_EXPORTER_OTLP_PROTOCOL is {others.pop()}; unset it, and "
            "give OTEL_EXPORTER_OTLP_ENDPOINT the collector's port for HTTP, 4318 by default"
        )
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    if "wandb" in settings.to and not settings.offline and not _has_key(server):
        raise ValueError(
            "report_to needs a key of Weights & Biases, and neither the environment variable WANDB_API_KEY nor the "
            f"netrc file has one for {server}; set WANDB_API_KEY, run `wandb login`, set report_to.offline: true, or "
            "remove report_to"
        )


def _has_key(server: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# --- settings that are reported ---


def config_of(run: RunFolder) -> dict[str, Any]:
    """Returns what may be known of the settings of the three programs, as they are recorded, or as the launcher has
    written them for a program that records none."""
    config = {}
    for role in get_args(Role):
        if (settings := recorded_settings(run.path, role)) is None:
            with contextlib.suppress(OSError, yaml.YAMLError):
                settings = yaml.safe_load((run.path / "settings" / f"{role}.yaml").read_text(encoding="utf-8"))
        if settings is not None:
            config[role] = known(settings)
    return {"run_id": run.run_id} | config


def known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers and switches of settings, and the texts of KNOWN_TEXTS that are no address. What else there
    is may be a secret, whatever its key is called."""
    return {key: kept for key, value in settings.items() if key not in _FREE and (kept := _public(key, value)) != {}}


def _public(key: str, value: Any) -> Any:
    """Returns an empty mapping for what is not reported."""
    if isinstance(value, Mapping):
        return known(value)
    if isinstance(value, list | tuple):
        return [kept for one in value if (kept := _public(key, one)) != {}]
    if isinstance(value, str):
        return value if key in KNOWN_TEXTS and "://" not in value else {}
    return value
