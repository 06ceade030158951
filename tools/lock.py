"""The versions of the image's libraries, locked: `python -m tools.lock cpu|cuda` writes deploy/requirements-cpu.txt.

pip resolves this project's dependencies as a fresh installation would, without installing anything. The image then
installs what the file names and nothing else, so that it is the same each time until the file is made anew.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"cpu": ("torchvision", "torchaudio", "torchcodec"), "cuda": ()}
"""The CPU build of vLLM asks for these, which come as CUDA builds and break transformers beside a CPU torch."""


def locked(extra: str) -> list[str]:
    """Each library with its version, by name."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([*command, f".[{extra}]"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    names = sorted((re.sub("[-_.]+", "-", one["name"].lower()), one["version"]) for one in found)
    return [f"{name}=={version}" for name, version in names if name not in ("grpo", *LEFT_OUT[extra])]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", choices=sorted(LEFT_OUT))
    extra = parser.parse_args().extra
    head = f"# Made by python -m tools.lock {extra}; not to be edited."
    (ROOT / "deploy" / f"requirements-{extra}.txt").write_text("\n".join([head, *locked(extra)]) + "\n")


if __name__ == "__main__":
    main()
