"""The server that lends the base (`colocate`) while the training goes on: whether it lives, and what follows from that.

Main memory that was lent outlives its lender: the training goes on with it until a server that was started again lends
the same weights. Those are then borrowed in its place, and it is released, so that there is one copy again.

A GPU's memory is not to be trusted once its lender has ended, and is released at once, because the next server needs
the room. Nothing that was computed on it is kept unless the lender gives a sign of life when it is done, and it is
computed again on what the next server lends. Not yet run on a GPU: the decisions are tested with stand-ins.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

import torch

from configs.train import TrainSettings
from trainer.errors import LenderGone
from trainer.model import Policy
from trainer.parallel import Ranks
from transport.errors import DeadlineError
from transport.shared_base.lending import Borrowed, offered
from transport.status import StatusFile

log = logging.getLogger(__name__)

T = TypeVar("T")
ASK_AGAIN_S = 0.2


def nothing() -> None:
    """Takes nothing back, or finds nothing wrong."""


class OwnBase:
    """A base that is the trainer's own: it is always there."""

    def look(self) -> None:
        """Borrows anew where the lender has ended and another lends. Takes microseconds while the lender lives; else it
        may take what borrowing takes, or some seconds where a server is there and does not answer. Raises `ModelError`,
        `SharedBaseError` or `CorruptError` for an offer that does not fit, and `LenderGone` where a GPU has failed with
        its lender."""

    def computed(self, compute: Callable[[], T], *, doing: str, step: int, undo: Callable[[], None] = nothing) -> T:
        """What `compute` gives, which reads the base. Where that must be done again, `undo` takes back what it has
        left. `doing` is the status in which it happens. Collective where there are several ranks. Raises what `look`
        raises."""
        return compute()


OWN = OwnBase()


class Lender(Protocol):
    """`transport.shared_base.door.Link`."""

    def is_broken(self) -> bool:
        """Whether the lender is known to have ended. Never waits."""

    def answers(self) -> bool:
        """Whether the lender gives a sign of life that is asked for now; where not, it is known to have ended."""

    def close(self) -> None:
        """Ends the borrowing."""


class LentBase(OwnBase):
    """A base in main memory that a server lends."""

    def __init__(
        self, lender: Lender, *, offer: Callable[[], Borrowed | None], renew: Callable[[Borrowed], None]
    ) -> None:
        """`offer` gives what a server lends now, and `renew` puts it in the place of what was borrowed before."""
        self._lender, self._offer, self._renew = lender, offer, renew
        self._has_ended = False

    def look(self) -> None:
        if not self._lender.is_broken():
            return
        self._notice()
        if (offer := self._offer()) is not None:
            self._take(offer)

    def computed(self, compute: Callable[[], T], *, doing: str, step: int, undo: Callable[[], None] = nothing) -> T:
        self.look()
        return compute()

    def _notice(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._ended()

    def _ended(self) -> None:
        """Called once for each lender that has ended."""
        log.warning("the server that lends the base weights has ended; they are borrowed anew once it lends again")

    def _take(self, offer: Borrowed) -> None:
        started_s = time.perf_counter()
        self._renew(offer)
        self._lender.close()
        self._lender, self._has_ended = offer.lender, False
        log.info("the base weights were borrowed anew in %.2f s", time.perf_counter() - started_s)


class PerishableBase(LentBase):
    """A base in the memory of a GPU, which goes with the server that lends it."""

    def __init__(
        self,
        lender: Lender,
        *,
        offer: Callable[[], Borrowed | None],
        renew: Callable[[Borrowed], None],
        let_go: Callable[[], None],
        settle: Callable[[], None],
        ranks: Ranks,
        status: StatusFile,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        """`let_go` releases what was borrowed; `settle` returns when the GPU has done what it was told; `check` is
        called while one waits for a server, and ends that by raising."""
        super().__init__(lender, offer=offer, renew=renew)
        self._let_go, self._settle, self._ranks, self._status = let_go, settle, ranks, status
        self._timeout_s, self._check = timeout_s, check

    def computed(self, compute: Callable[[], T], *, doing: str, step: int, undo: Callable[[], None] = nothing) -> T:
        """Raises `DeadlineError` too, where no server lends in time.

        An open connection would not prove that the memory was there: the sign of life is asked for once the GPU is
        done.
        """
        while True:
            self._until_lent(doing, step)
            try:
                result = compute()
                self._settle()
            except RuntimeError as error:
                if self._lender.answers():
                    raise
                raise _gone("computed on", error) from error
            if not self._ranks.most(int(not self._lender.answers())):
                return result
            undo()
            log.warning("step %d, %s: the server ended meanwhile; what was computed is computed again", step, doing)

    def _ended(self) -> None:
        super()._ended()
        try:
            self._let_go()
        except RuntimeError as error:
            raise _gone("released", error) from error

    def _take(self, offer: Borrowed) -> None:
        """An offer whose server ends before its weights are read is none."""
        try:
            super()._take(offer)
        except Exception as error:
            if offer.lender.answers():
                raise
            offer.lender.close()
            if isinstance(error, RuntimeError):
                raise _gone("read", error) from error
            log.warning("the server that was started again ended before its base weights were read: %s", error)
            return
        if not self._lender.answers():
            self._notice()

    def _until_lent(self, doing: str, step: int) -> None:
        self.look()
        if not self._lender.is_broken():
            return
        self._status.set("waiting", step=step, waiting_for="grpo-infer to lend its base weights again")
        deadline_s = time.monotonic() + self._timeout_s
        while self._lender.is_broken():
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"waited {self._timeout_s:g} s (wait_timeout_s) for grpo-infer, which has ended, to lend its base "
                    "weights again; start it again, or see its log"
                )
            self._check()
            time.sleep(ASK_AGAIN_S)
            self.look()
        self._status.set(doing, step=step)


@contextmanager
def while_lent(borrowed: Borrowed | None, device: torch.device) -> Iterator[None]:
    """Within it a model is made of what was borrowed, and tried. Where that fails on a GPU, whatever its error is, and
    the lender has ended, what was read proves nothing: raises `LenderGone`."""
    try:
        yield
    except Exception as error:
        if borrowed is None or device.type == "cpu" or borrowed.lender.answers():
            raise
        raise _gone("loaded", error) from error


def _gone(doing: str, error: Exception) -> LenderGone:
    return LenderGone(
        f"the server ended while the trainer {doing} the base weights that it lends ({error}); nothing of that was "
        "published: go on with ckpt.resume_step: -1"
    )


def base_of(
    settings: TrainSettings,
    policy: Policy,
    borrowed: Borrowed | None,
    *,
    device: torch.device,
    ranks: Ranks,
    status: StatusFile,
    check: Callable[[], None],
) -> OwnBase:
    """The base of `policy`, which was made with `borrowed`."""
    if borrowed is None:
        return OWN
    offer = partial(offered, settings.output_dir, device)
    if device.type == "cpu":
        return LentBase(borrowed.lender, offer=offer, renew=partial(policy.borrow_anew, compare=True))
    return PerishableBase(
        borrowed.lender,
        offer=offer,
        renew=partial(policy.borrow_anew, compare=False),
        let_go=policy.let_go,
        settle=partial(torch.cuda.synchronize, device),
        ranks=ranks,
        status=status,
        timeout_s=settings.wait_timeout_s,
        check=check,
    )
