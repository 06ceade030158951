"""Stops a run whose environment fails too often, and logs failures until then."""

import logging
from collections import Counter, defaultdict, deque
from functools import partial

from grpo.orchestrator.rollouts.records import Failure

log = logging.getLogger(__name__)

LATE = "env_timeout"
MIN_IN_A_ROW = 32
"""So many failures in a row, or as many as a window has if that is more, are too many whatever the limit."""


class EnvironmentFailed(RuntimeError):
    """An environment that cannot work at all; the message carries its own traceback."""


class EnvironmentKilled(EnvironmentFailed):
    """A signal ended the environment's process before it was loaded, or its server is gone. Started again, it may
    work."""


class FailureRate:
    """Counts the outcomes of each environment's rollouts, evaluation included, as they come, and logs failures."""

    def __init__(self, *, window: int, limit: float) -> None:
        """More failures than `limit`, a share, of an environment's last `window` rollouts are too many. So are `window`
        failures in a row, at least 32, whatever the limit."""
        self._window, self._limit = window, limit
        self._outcomes: defaultdict[str, deque[bool]] = defaultdict(partial(deque, maxlen=window))
        self._in_a_row: Counter[str] = Counter()
        self._num_failed: Counter[tuple[str, str]] = Counter()

    def record(self, env: str, failure: Failure | None) -> None:
        """Counts one rollout. Raises EnvironmentFailed with this failure's message where there are too many."""
        outcomes = self._outcomes[env]
        outcomes.append(failure is not None)
        self._in_a_row[env] = 0 if failure is None else self._in_a_row[env] + 1
        if failure is None:
            return
        self._num_failed[env, failure.reason] += 1
        if (num := self._num_failed[env, failure.reason]).bit_count() == 1:  # the 1st, 2nd, 4th, 8th ...
            log.warning("environment %s: rollout %d failed (%s): %s", env, num, failure.reason, failure.message)
        too_many_in_a_row = self._in_a_row[env] >= max(MIN_IN_A_ROW, self._window)
        if sum(outcomes) > self._limit * self._window or too_many_in_a_row:
            raise EnvironmentFailed(
                f"environment {env}: {sum(outcomes)} of the last {len(outcomes)} rollouts failed, more than "
                f"max_env_failure_rate = {self._limit:g} of a step's {self._window}; "
                f"the last one ({failure.reason}): {failure.message}"
            )
