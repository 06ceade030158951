"""What a trainer does when the server that lends its base ends: with main memory, and, with stand-ins, a GPU's."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import trainer.lender
from tests.trainer.bench import Bench, on_policy, settings_for
from tests.trainer.lent import lent
from tests.trainer.models import tiny_batch, tiny_policy
from trainer.errors import LenderGone, ModelError
from trainer.lender import OWN, LentBase, OwnBase, PerishableBase, base_of
from trainer.model import Policy
from trainer.parallel import ONE
from transport.errors import DeadlineError, PeerFailed
from transport.shared_base.lending import Borrowed
from transport.status import StatusFile, read_status


class FakeLender:
    """Ends when it is told to. Where it is torn down, its connection is still open."""

    def __init__(self) -> None:
        self.ended = self.torn_down = self.closed = False

    def is_broken(self) -> bool:
        return self.ended

    def answers(self) -> bool:
        self.ended |= self.torn_down
        return not self.ended

    def close(self) -> None:
        self.closed = True


class FakeOffer:
    """What is borrowed of it."""

    def __init__(self) -> None:
        self.lender = FakeLender()


class World:
    """Servers, of which each call of `offer` finds what was put in last."""

    def __init__(self) -> None:
        self.first, self.offered, self.taken = FakeLender(), list[Any](), list[Any]()
        self.num_asked = self.num_let_go = 0

    def offer(self) -> Any:
        self.num_asked += 1
        return self.offered.pop(0) if self.offered else None

    def renew(self, offer: Any) -> None:
        self.taken.append(offer)

    def let_go(self) -> None:
        self.num_let_go += 1


def lent_base(world: World) -> LentBase:
    return LentBase(world.first, offer=world.offer, renew=world.renew)


def perishable(
    world: World, tmp_path: Path, *, timeout_s: float = 5.0, check: Callable[[], None] = lambda: None
) -> PerishableBase:
    return PerishableBase(
        world.first,
        offer=world.offer,
        renew=world.renew,
        let_go=world.let_go,
        settle=lambda: None,
        ranks=ONE,
        status=StatusFile(tmp_path / "train.json"),
        timeout_s=timeout_s,
        check=check,
    )


def test_while_the_lender_lives_nobody_is_asked() -> None:
    world = World()
    base = lent_base(world)
    base.look()
    assert base.computed(lambda: 7, doing="training", step=1) == 7
    assert world.num_asked == 0


def test_in_main_memory_the_training_goes_on_until_a_server_lends_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    base = lent_base(world)
    world.first.ended = True
    with caplog.at_level(logging.INFO):
        assert base.computed(lambda: 1, doing="training", step=1) == 1
        base.look()
        assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once
        second = FakeOffer()
        world.offered.append(second)
        assert base.computed(lambda: list(world.taken), doing="training", step=2) == [second]  # before the step
        assert "borrowed anew" in caplog.text
    assert world.first.closed
    world.num_asked = 0
    base.look()
    assert world.num_asked == 0
    second.lender.ended = True  # and once more
    third = FakeOffer()
    world.offered.append(third)
    base.look()
    assert world.taken == [second, third]


def test_an_offer_that_does_not_fit_ends_the_trainer() -> None:
    def refuse(_: Any) -> None:
        raise ModelError("otherwise")

    world = World()
    base = LentBase(world.first, offer=world.offer, renew=refuse)
    world.first.ended = True
    world.offered.append(FakeOffer())
    with pytest.raises(ModelError, match="otherwise"):
        base.look()


def test_on_a_gpu_nothing_is_computed_before_a_server_lends_again(tmp_path: Path) -> None:
    world = World()
    statuses = list[Any]()

    def look() -> None:
        statuses.append(read_status(tmp_path / "train.json"))
        world.offered.append(FakeOffer())

    base = perishable(world, tmp_path, check=look)
    world.first.ended = True
    for _ in range(2):
        base.look()  # never waits
        assert world.num_let_go == 1  # so that the next server has the room
    assert base.computed(lambda: len(world.taken), doing="training", step=3) == 1
    (waiting,) = statuses
    assert (waiting["state"], waiting["step"]) == ("waiting", 3)
    assert waiting["waiting_for"] == "grpo-infer to lend its base weights again"
    assert read_status(tmp_path / "train.json")["state"] == "training"  # type: ignore[index]


def test_on_a_gpu_the_wait_for_a_server_has_a_deadline_and_an_end(tmp_path: Path) -> None:
    world = World()
    world.first.ended = True
    with pytest.raises(DeadlineError, match=r"waited 0\.01 s \(wait_timeout_s\) for grpo-infer, which has ended"):
        perishable(world, tmp_path, timeout_s=0.01).computed(lambda: 1, doing="training", step=1)

    def fail() -> None:
        raise PeerFailed("grpo-orch has failed")

    with pytest.raises(PeerFailed, match="grpo-orch has failed"):
        perishable(world, tmp_path, check=fail).computed(lambda: 1, doing="training", step=1)


@pytest.mark.parametrize("way", ["ended", "torn_down"])
def test_on_a_gpu_what_was_computed_when_the_lender_ended_is_computed_again(tmp_path: Path, way: str) -> None:
    """Its connection alone may still be open."""
    world = World()
    base, log = perishable(world, tmp_path), list[str]()
    second = FakeOffer()

    def compute() -> int:
        log.append("computed")
        if not world.taken:
            setattr(world.first, way, True)
            world.offered.append(second)
        return len(world.taken)

    assert base.computed(compute, doing="training", step=1, undo=lambda: log.append("undone")) == 1
    assert log == ["computed", "undone", "computed"]


def test_a_gpu_that_fails_with_its_lender_is_told_from_one_that_fails_by_itself(tmp_path: Path) -> None:
    world = World()
    base = perishable(world, tmp_path)

    def fail(*, lender_too: bool) -> None:
        world.first.torn_down = lender_too
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match=r"^CUDA error"):
        base.computed(lambda: fail(lender_too=False), doing="training", step=1)
    with pytest.raises(LenderGone, match=r"the server ended while the trainer computed .* an illegal memory access"):
        base.computed(lambda: fail(lender_too=True), doing="training", step=1)


READING = [ModelError("q has other values than the checkpoint"), RuntimeError("CUDA error: an illegal memory access")]


@pytest.mark.parametrize("error", READING)
def test_on_a_gpu_a_server_that_ends_while_its_weights_are_read_has_lent_nothing(
    tmp_path: Path, error: Exception
) -> None:
    """What was read of it proves nothing about the checkpoint; a GPU that has failed needs another process."""
    world = World()
    second, third = FakeOffer(), FakeOffer()
    world.first.ended = True
    world.offered += [second, third]

    def renew(offer: Any) -> None:
        if offer is second:
            second.lender.torn_down = True
            raise error
        world.taken.append(offer)

    world.renew = renew  # type: ignore[method-assign]
    base = perishable(world, tmp_path)
    if isinstance(error, RuntimeError):
        with pytest.raises(LenderGone, match=r"while the trainer read the base weights .* an illegal memory access"):
            base.look()
    else:
        base.look()
        assert world.taken == []
        assert base.computed(lambda: list(world.taken), doing="training", step=1) == [third]
    assert second.lender.closed


def test_on_a_gpu_an_error_in_what_a_living_server_lends_is_an_error(tmp_path: Path) -> None:
    for error in READING:
        world = World()
        world.first.ended = True
        world.offered.append(FakeOffer())

        def refuse(_: Any, error: Exception = error) -> None:
            raise error

        world.renew = refuse  # type: ignore[method-assign]
        with pytest.raises(type(error), match=str(error)):
            perishable(world, tmp_path).look()


def test_on_a_gpu_what_a_server_lent_that_has_ended_meanwhile_is_released_at_once(tmp_path: Path) -> None:
    world = World()
    offer = FakeOffer()
    world.first.ended = offer.lender.torn_down = True
    world.offered.append(offer)
    perishable(world, tmp_path).look()
    assert (world.taken, world.num_let_go) == ([offer], 2)


def test_a_gpu_that_fails_when_the_weights_are_released_has_failed_with_the_lender(tmp_path: Path) -> None:
    world = World()
    world.first.ended = True

    def fail() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    world.let_go = fail  # type: ignore[method-assign]
    with pytest.raises(LenderGone, match="while the trainer released the base weights"):
        perishable(world, tmp_path).look()


class Wired:
    """What `base_of` makes on a device, and what it calls there, in order."""

    def __init__(self, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.first, self.offer = list[Any](), FakeLender(), FakeOffer()
        self.device, settings = torch.device(device), settings_for(tmp_path, output_dir=str(tmp_path / "run"))

        def offered(*where: Any) -> Any:
            self.calls.append(("offered", *where))
            return self.offer

        monkeypatch.setattr(trainer.lender, "offered", offered)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda where: self.calls.append(("settled", where)))
        monkeypatch.setattr(FakeLender, "answers", self._answers)
        policy = SimpleNamespace(
            borrow_anew=lambda offer, *, compare: self.calls.append(("borrow anew", offer, compare)),
            let_go=lambda: self.calls.append("let go"),
        )
        self.base: OwnBase = base_of(
            settings,
            cast(Policy, policy),
            cast(Borrowed, SimpleNamespace(lender=self.first)),
            device=self.device,
            ranks=ONE,
            status=StatusFile(tmp_path / "train.json"),
            check=lambda: None,
        )
        self.asked = ("offered", settings.output_dir, self.device)

    def _answers(self) -> bool:
        self.calls.append("answers")
        return True

    def compute(self) -> list[Any]:
        """The calls of one computation, and of a look before."""
        self.calls.clear()
        self.base.computed(lambda: self.calls.append("computed"), doing="training", step=1)
        return list(self.calls)


def test_on_a_cpu_every_byte_of_what_is_borrowed_anew_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = Wired("cpu", tmp_path, monkeypatch)
    assert wired.compute() == ["computed"]
    wired.first.ended = True
    assert wired.compute() == [wired.asked, ("borrow anew", wired.offer, True), "computed"]


def test_on_a_gpu_the_sign_of_life_is_asked_for_when_the_gpu_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wired = Wired("cuda", tmp_path, monkeypatch)
    done = ["computed", ("settled", wired.device), "answers"]
    assert wired.compute() == done
    wired.first.ended = True
    anew = ["let go", wired.asked, ("borrow anew", wired.offer, False), "answers"]
    assert wired.compute() == anew + done


def test_who_borrows_nothing_has_a_base_of_its_own(tmp_path: Path) -> None:
    nobody: Any = None
    base = base_of(
        settings_for(tmp_path), nobody, None, device=torch.device("cpu"), ranks=ONE, status=nobody, check=nobody
    )
    assert base is OWN


def test_the_bases_own_canary_is_computed_only_while_the_base_is_lent(tiny_model: Path, tmp_path: Path) -> None:
    world = World()
    world.first.ended = True
    offer = FakeOffer()
    world.offered.append(offer)
    Bench(tiny_model, tmp_path, base=perishable(world, tmp_path))  # which begins with it
    assert world.taken == [offer]


def test_a_step_that_is_computed_again_is_the_step(tiny_model: Path, tmp_path: Path) -> None:
    """The gradients of the first time are taken away, so that two runs come to the same weights."""
    found = list[Any]()
    for interrupted in (False, True):
        world = World()
        folder = tmp_path / str(interrupted)
        folder.mkdir()
        base = perishable(world, folder)
        bench = Bench(tiny_model, folder, max_steps=2, base=base, max_grad_norm=1e9)
        backward = bench.trainer._objective._backward

        def ending(*given: Any, world: World = world, backward: Any = backward, often: bool = interrupted) -> Any:
            metrics = backward(*given)
            if often and not world.taken:
                world.first.ended = True
                world.offered.append(FakeOffer())
            return metrics

        bench.trainer._objective._backward = ending  # type: ignore[method-assign]
        for step in (1, 2):
            bench.send(step, on_policy(tiny_batch((6, 9, 4), seed=step, step=step), bench.policy))
        bench.trainer.train()
        assert len(world.taken) == interrupted
        assert bench.metrics(1)["optim/grad_norm"] > 0
        found.append([bench.files(version)["adapter_model.safetensors"] for version in (1, 2)])
        found.append([bench.metrics(version)["optim/grad_norm"] for version in (1, 2)])
    assert found[:2] == found[2:]


def test_a_canary_that_is_computed_when_the_lender_ends_is_not_published(tiny_model: Path, tmp_path: Path) -> None:
    world = World()
    bench = Bench(tiny_model, tmp_path, max_steps=1, base=perishable(world, tmp_path, timeout_s=0.01))
    canaries = bench.trainer._publishing._canaries

    def ending(*given: Any) -> Any:
        found = canaries(*given)
        world.first.ended = True
        return found

    bench.trainer._publishing._canaries = ending  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="for grpo-infer, which has ended"):
        bench.trainer.train()
    bench.trainer.close()
    assert not bench.policies.versions


def test_the_base_is_borrowed_anew_while_the_trainer_waits_for_a_batch(tiny_model: Path, tmp_path: Path) -> None:
    world = World()
    bench = Bench(tiny_model, tmp_path, wait_timeout_s=1.0, base=lent_base(world))
    bench.trainer.begin(None)
    world.first.ended = True
    world.offered.append(FakeOffer())
    with pytest.raises(DeadlineError, match="batch 1"):
        bench.trainer.receive(1)
    assert len(world.taken) == 1


def test_a_look_at_a_lender_that_lives_is_nothing_beside_a_step(tiny_model: Path) -> None:
    import time

    borrowed = lent(tiny_model)
    policy = tiny_policy(tiny_model, borrowed=borrowed)
    base = LentBase(borrowed.lender, offer=lambda: None, renew=lambda offer: policy.borrow_anew(offer, compare=True))
    base.look()
    began_s = time.process_time()
    for _ in range(1000):
        base.look()
    assert time.process_time() - began_s < 1.0  # 1,000 looks
