"""The versions of the image's libraries, locked: `python -m tools.lock cpu|cuda` writes deploy/requirements-cpu.txt.

pip resolves this project's dependencies for the image (its Python, x86-64 Linux, wheels of PyPI, and for `cpu` those of
torch's index for CPUs) without installing anything; what the machine's own pip is set to plays no part. The image then
installs what the file names and nothing else, so that it is the same each time until the file is made anew. Behind each
version stands what its wheel requires there, so that a test can tell whether the file is complete.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PYTHON = "3.11"
"""The image's, as deploy/Dockerfile has it."""
NEWEST_GLIBC = 36
"""The minor version of Debian 12's; wheels for it and for older ones are taken."""
INDEXES = {"cpu": ("--extra-index-url", "https://download.pytorch.org/whl/cpu"), "cuda": ()}
LEFT_OUT = {"cpu": ("torchvision", "torchaudio", "torchcodec"), "cuda": ()}
"""The CPU build of vLLM asks for these, which come as CUDA builds and break transformers beside a CPU torch."""

IN_IMAGE = ("wandb", "tensorboard", "plots", "math", "openenv", "bitsandbytes", "telemetry")
"""Extras that the image has besides `cpu` or `cuda`, since nobody installs anything in it later."""


def canonical(name: str) -> str:
    """Returns a library's name as PyPI compares it."""
    return re.sub("[-_.]+", "-", name.lower())


def own_requirements(extra: str) -> list[str]:
    """Returns what this project requires with an extra, and with those of the image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return list(
        dict.fromkeys([*project["dependencies"], *(one for name in (extra, *IN_IMAGE) for one in extras[name])])
    )


def resolved(extra: str) -> dict[str, dict[str, Any]]:
    """Returns the metadata of each library's wheel, by name. Raises `CalledProcessError` where pip finds no solution,
    and `RuntimeError` on a machine of another kind than the image: pip evaluates the conditions of requirements for the
    machine that it runs on."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not sys.version.startswith(f"{PYTHON}."):
        raise RuntimeError(f"this is {sys.version} on {sys.platform}; lock with Python {PYTHON} on x86-64 Linux")
    platforms = ["manylinux2014", "manylinux1", *(f"manylinux_2_{minor}" for minor in range(5, NEWEST_GLIBC + 1))]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, *(f"--platform={one}_x86_64" for one in platforms)]
    command += ["--index-url", "https://pypi.org/simple", *INDEXES[extra], *own_requirements(extra)]
    others = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return {canonical(one["name"]): one for one in found if canonical(one["name"]) not in LEFT_OUT[extra]}


def requirements(metadata: dict[str, Any], extras: set[str]) -> list[Requirement]:
    """Returns what a wheel requires in the image, with some of its extras; `""` stands for none."""
    stated = [Requirement(one) for one in metadata.get("requires_dist", ())]
    return [one for one in stated if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in extras)]


def locked(extra: str) -> list[str]:
    """Returns `name==version  # what it requires` for each library."""
    found, own = resolved(extra), [Requirement(one) for one in own_requirements(extra)]
    extras = {name: {""} for name in found}
    while True:  # an extra that one asks of another brings requirements, which may ask for extras again
        needs = {
            name: [one for one in requirements(metadata, extras[name]) if canonical(one.name) not in LEFT_OUT[extra]]
            for name, metadata in found.items()
        }
        before = sum(map(len, extras.values()))
        for one in (*own, *(one for some in needs.values() for one in some)):
            extras[canonical(one.name)] |= one.extras
        if sum(map(len, extras.values())) == before:
            break
    described = {
        name: ", ".join(sorted({f"{canonical(one.name)}{one.specifier}" for one in needs[name]})) for name in found
    }
    return [f"{name}=={found[name]['version']}  # {described[name]}".rstrip(" #") for name in sorted(found)]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", choices=sorted(LEFT_OUT))
    extra = parser.parse_args().extra
    head = f"# Made by python -m tools.lock {extra}; not to be edited."
    (ROOT / "deploy" / f"requirements-{extra}.txt").write_text("\n".join([head, *locked(extra)]) + "\n")


if __name__ == "__main__":
    main()
