"""The locked versions of the image's libraries: complete, and such as can be had."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.lock import LEFT_OUT, PYTHON, own_requirements

DEPLOY = Path(__file__).parents[1] / "deploy"
FROM_TORCH = {"cpu": {"torch"}, "cuda": set()}
"""Libraries that come from torch's own index; all others are PyPI's."""


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_all_that_a_locked_library_requires_is_locked_in_a_version_that_serves(extra: str) -> None:
    lines = (DEPLOY / f"requirements-{extra}.txt").read_text().splitlines()[1:]
    pins = {name: Version(version) for name, version in (line.partition("  # ")[0].split("==") for line in lines)}
    required = [
        *(Requirement(one) for one in own_requirements(extra)),
        *(Requirement(one) for line in lines for one in line.partition("  # ")[2].replace(", ", "\n").splitlines()),
    ]
    wanted = {canonicalize_name(one.name) for one in required} - set(LEFT_OUT[extra])
    assert wanted == pins.keys()
    unmet = [
        one for one in required if one.name in pins and not one.specifier.contains(pins[one.name], prereleases=True)
    ]
    assert unmet == []
    assert {name for name, version in pins.items() if version.local} == FROM_TORCH[extra], "PyPI has no local versions"


def test_the_image_has_the_python_that_its_libraries_are_locked_for() -> None:
    assert f"ARG PYTHON_VERSION={PYTHON}\n" in (DEPLOY / "Dockerfile").read_text()
