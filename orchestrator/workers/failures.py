"""When an environment fails so often that going on is of no use, and what is said about its failures until then."""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial

from orchestrator.rollouts.records import Failure

log = logging.getLogger(__name__)

LATE = "env_timeout"
MAX_LATE_IN_A_ROW = 8
LOG_INTERVAL_S = 60.0


class EnvironmentFailed(RuntimeError):
    """An environment that cannot work at all; the message carries its own traceback."""


class EnvironmentKilled(EnvironmentFailed):
    """A signal ended the environment's process before it could say what it is; started again, it may work."""


class FailureRate:
    """Counts the outcomes of each environment's rollouts, evaluation included, as they come, and logs failures."""

    def __init__(
        self,
        *,
        window: int,
        limit: float,
        max_late_in_a_row: int = MAX_LATE_IN_A_ROW,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """More than `limit` (a share) of an environment's last `window` rollouts is too often; so is to be late
        `max_late_in_a_row` times with no answer in between, whatever the limit: that environment hangs. Of rollouts
        that were late at one time only one is counted: each must have begun when the one before it had failed. `clock`
        is that of `Failure.began_s`."""
        self._window, self._limit, self._max_late, self._clock = window, limit, max_late_in_a_row, clock
        self._outcomes: defaultdict[str, deque[bool]] = defaultdict(partial(deque, maxlen=window))
        self._late_s: defaultdict[str, list[float]] = defaultdict(list)
        """When those that were late in a row were counted."""
        self._num_failed: Counter[tuple[str, str]] = Counter()
        self._logged_at_s: dict[tuple[str, str], float] = {}

    def record(self, env: str, failure: Failure | None) -> None:
        """Counts one rollout. Raises EnvironmentFailed with this failure's message where there are too many."""
        outcomes, late_s = self._outcomes[env], self._late_s[env]
        outcomes.append(failure is not None)
        if failure is None or failure.reason != LATE:
            late_s.clear()
        if failure is None:
            return
        self._log(env, failure)
        if failure.reason == LATE and not (late_s and failure.began_s is not None and failure.began_s < late_s[-1]):
            late_s.append(self._clock())
        if len(late_s) >= self._max_late:
            raise EnvironmentFailed(
                f"environment {env} hangs, {self._max_late} times in a row: {failure.message}; mend its reward, "
                "or raise reward_timeout_s"
            )
        if sum(outcomes) > self._limit * self._window:
            raise EnvironmentFailed(
                f"environment {env}: {sum(outcomes)} of the last {len(outcomes)} rollouts failed, more than "
                f"max_env_failure_rate = {self._limit:g} of a step's {self._window}; "
                f"the last one ({failure.reason}): {failure.message}"
            )

    def _log(self, env: str, failure: Failure) -> None:
        """The first failure of each kind with its message, then their number at intervals."""
        kind, now_s = (env, failure.reason), self._clock()
        self._num_failed[kind] += 1
        if self._num_failed[kind] > 1 and now_s - self._logged_at_s[kind] < LOG_INTERVAL_S:
            return
        self._logged_at_s[kind] = now_s
        if self._num_failed[kind] == 1:
            log.warning("environment %s: a first rollout failed (%s): %s", env, failure.reason, failure.message)
        else:
            log.warning("environment %s: %d rollouts failed (%s)", env, self._num_failed[kind], failure.reason)
