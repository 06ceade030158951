"""Which steps are removed from a folder of batches, and when it is looked through."""

from pathlib import Path

from transport.batches.store import StepStore


class Counted(StepStore):
    """One that counts how often it lists the folder."""

    num_listings = 0

    def steps(self) -> list[int]:
        self.num_listings += 1
        return super().steps()


def store_with(folder: Path, *steps: int) -> Counted:
    store = Counted(folder, run_id="run")
    for step in steps:
        store.write(step, [b"message"], durable=False)
    return store


def test_steps_up_to_one_are_removed_and_later_ones_stay(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3, 4)
    store.remove_up_to(2)
    assert store.steps() == [3, 4]
    store.remove_up_to(3)
    assert store.steps() == [4]


def test_a_folder_is_not_looked_through_while_nothing_new_may_go(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    for _ in range(5):
        store.remove_up_to(0)  # as without checkpoints
    assert store.num_listings == 0
    for _ in range(5):
        store.remove_up_to(2)
    assert store.num_listings == 1
    store.write(2, [b"again"], durable=False)  # made anew after going back
    store.remove_up_to(1)
    store.remove_up_to(2)
    assert store.steps() == [3]
