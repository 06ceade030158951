"""A recipe of tinker-cookbook, unchanged, on the embedded model; `benchmarks.service_recipes` runs all of them."""

from collections.abc import Iterator

import pytest

from benchmarks.service_recipes import COOKBOOK, RECIPES, Workplace

pytestmark = [
    pytest.mark.service,
    pytest.mark.e2e,
    pytest.mark.skipif(
        not COOKBOOK.is_dir(), reason="needs tinker-cookbook, which docs/service.md tells how to install"
    ),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    work = Workplace(tmp_path_factory.mktemp("cookbook"))
    yield work
    work.close()


def test_its_curve_goes_where_it_should(work: Workplace) -> None:
    recipe, least = RECIPES["shorter"]
    found = recipe(work)
    assert len(found.values) >= 12
    assert found.gain >= least, found.values
