"""What a rank says that does not hear from the main one."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.bench import settings_for
from trainer.errors import RankFailed, RanksApart
from trainer.parallel import Ranks
from trainer.startup import joined


class Broken(Ranks):
    """A rank whose communication ends with `error`."""

    error: RuntimeError

    def from_main(self, value: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("said", "expected", "message"),
    [
        ("Connection closed by peer [127.0.0.1]", RankFailed, "rank 0, which joins the run for all, has ended: Conn"),
        (
            "Timed out waiting 5000ms for recv operation to complete",
            RanksApart,
            r"waited 5 s \(wait_timeout\) for rank 0, which joins the run for all; raise it, or see",
        ),
        ("wait timeout after 5000ms, keys: /0", RanksApart, r"waited 5 s \(wait_timeout\)"),
    ],
)
def test_a_main_rank_that_takes_long_is_told_from_one_that_has_ended(
    tmp_path: Path, said: str, expected: type[Exception], message: str
) -> None:
    rank, settings = Broken(rank=1, size=2), settings_for(tmp_path, output_dir=str(tmp_path / "run"))
    object.__setattr__(rank, "error", RuntimeError(said))
    with pytest.raises(expected, match=message), joined(settings, "base", rank):
        pass
