"""A log of rollouts to be read by a person. What a run has rolled out is in its traces, too."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from grpo.orchestrator.rollouts.records import EpisodeResult

MAX_CHARACTERS = 2000
"""How much of one message is logged."""


class VerboseLogger:
    """Appends rollouts and summaries to a file, with the time of day.

    Example::

        with VerboseLogger("debate.log") as log:
            async for batch in arena.run(num_steps=3):
                for result in batch.results:
                    log.log_result(result)
                log.log_batch_summary(batch.results)
    """

    def __init__(self, log_path: str | Path) -> None:
        self._path = Path(log_path)

    def __enter__(self) -> "VerboseLogger":
        self._file = self._path.open("a", encoding="utf-8", errors="replace")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def log_result(self, result: EpisodeResult, depth: int = 0) -> None:
        """Logs a rollout with its messages, errors, rewards, and all rollouts that it spawned."""
        self._log("\n".join(_lines(result, depth)))

    def log_batch_summary(self, results: Sequence[EpisodeResult]) -> None:
        """Logs one line about many rollouts."""
        rewards = [result.reward for result in results if result.failure is None]
        mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
        self._log(f"{len(results)} rollouts, {len(results) - len(rewards)} failed{mean}")

    def _log(self, text: str) -> None:
        self._file.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
        self._file.flush()


def _lines(result: EpisodeResult, depth: int) -> Iterator[str]:
    pad = "    " * depth
    yield f"{pad}rollout {result.id} of {result.task.env}"
    for step in result.steps:
        for message in step.messages:
            yield _line(pad, str(message.get("role")), str(message.get("content")))
        yield _line(pad, f"{step.role} (version {step.version})", step.text)
        if step.error is not None:
            yield f"{pad}    ! {step.error.error_kind}: {step.error.message}"
    for child in result.children:
        yield from _lines(child, depth + 1)
    if result.failure is not None:
        yield f"{pad}    = failed ({result.failure.reason}): {result.failure.message}"
    else:
        yield f"{pad}    = rewards {dict(result.rewards)}, metrics {dict(result.metrics)}"


def _line(pad: str, who: str, text: str) -> str:
    cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} [{len(text) - MAX_CHARACTERS} more]"
    return f"{pad}    {who}: " + cut.replace("\n", f"\n{pad}        ")
