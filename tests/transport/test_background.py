"""Work beside what the caller does next."""

import threading

import pytest
from grpo.transport.background import Background
from grpo.transport.errors import DeadlineError, StorageError


class Slow:
    """Jobs that are done only when they may."""

    def __init__(self, timeout_s: float = 60) -> None:
        self.background = Background("slow", timeout_s=timeout_s, waits_for="the disk")
        self.may, self.order = threading.Event(), list[int]()

    def submit(self, number: int) -> None:
        self.background.submit(lambda: self._do(number))

    def _do(self, number: int) -> None:
        self.may.wait(60)
        if number == 13:
            raise StorageError("the disk is full")
        if number == 14:
            raise KeyboardInterrupt
        self.order.append(number)


def test_jobs_are_done_in_their_order_and_hold_nobody_up() -> None:
    slow = Slow()
    for number in (0, 1, 2):
        slow.submit(number)
    assert slow.order == []
    slow.may.set()
    slow.background.flush()
    assert slow.order == [0, 1, 2]
    slow.background.close()


def test_waits_end_with_an_error_that_says_for_whom() -> None:
    slow = Slow(timeout_s=1)
    for number in (0, 1, 2):  # the first is at work, two wait
        slow.submit(number)
    for wait in (slow.background.flush, lambda: slow.submit(3)):
        with pytest.raises(DeadlineError, match="the disk"):
            wait()
    slow.may.set()
    slow.background.close()
    assert slow.order == [0, 1, 2]


@pytest.mark.parametrize(("number", "error"), [(13, StorageError), (14, KeyboardInterrupt)])
def test_an_error_comes_to_light_at_the_next_call_and_nothing_more_is_done(
    number: int, error: type[BaseException]
) -> None:
    slow = Slow()
    slow.may.set()
    slow.submit(number)
    for call in (slow.background.flush, slow.background.check, lambda: slow.submit(15)):
        with pytest.raises(error):
            call()
    slow.background.close()
    assert slow.order == []
