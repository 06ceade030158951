"""A run as a person would tell it (`verbose`): each call, episode and batch in `story.log` of the run's folder."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo.orchestrator.rollouts.records import EpisodeResult
from grpo.orchestrator.samples import FinishedGroup

MAX_CHARACTERS = 2000
"""Of one message."""


class Story:
    """Appends to a file, a paragraph an episode and a line a batch."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "story.log").open("a", encoding="utf-8", errors="replace")

    def episode(self, result: EpisodeResult) -> None:
        """A rollout that is over, with those that it spawned."""
        self._tell("\n".join(_lines(result)))

    def batch(self, step: int, groups: Sequence[FinishedGroup]) -> None:
        """A batch that leaves."""
        results, trained = [one for group in groups for one in group.results], sum(len(one.trained) for one in groups)
        reward = sum(one.reward for one in results) / len(results)
        versions = sorted({version for one in results for version in one.versions})
        self._tell(
            f"batch {step}: {trained} rollouts of {len(groups)} groups, mean reward {reward:.3f}, sampled by versions "
            f"{', '.join(map(str, versions))}, {sum(one.num_tokens for one in results)} tokens"
        )

    def close(self) -> None:
        """Writes no more."""
        self._file.close()

    def _tell(self, text: str) -> None:
        self._file.write(f"[{time.strftime('%H:%M:%S')}] {text}\n")
        self._file.flush()


def _lines(result: EpisodeResult, depth: int = 0) -> Iterator[str]:
    pad = "    " * depth
    task = f"{result.task.env} example {result.task.index}" if depth == 0 else "sub-episode"
    if result.failure is None:
        rewards = ", ".join(f"{role} {reward:.3g}" for role, reward in result.rewards.items())
        metrics = ", ".join(f"{name} {value:.3g}" for name, value in result.metrics.items())
        end = f"rewards: {rewards or 'none'}" + (f"; measures: {metrics}" if metrics else "")
    else:
        end = f"failed ({result.failure.reason}): {result.failure.message.strip().rpartition(chr(10))[2]}"
    yield f"{pad}rollout {result.id}, {task}"
    for step in result.steps:
        for message in step.messages:
            yield _said(pad, str(message.get("role")), str(message.get("content")))
        tokens = len(step.completion.token_ids)
        yield _said(
            pad, f"{step.role} (version {step.version}, {tokens} tokens, {step.completion.finish_reason})", step.text
        )
        if step.error is not None:
            yield f"{pad}    ! {step.error.error_kind}: {step.error.message}"
    for child in result.children:
        yield from _lines(child, depth + 1)
    yield f"{pad}    = {end}"


def _said(pad: str, who: str, text: str) -> str:
    shown = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} [{len(text) - MAX_CHARACTERS} more]"
    return f"{pad}    {who}: " + shown.replace("\n", f"\n{pad}        ")
