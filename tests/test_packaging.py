"""The wheel: one name in site-packages, with all that the programs need."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = {"grpo": "grpo", **SETTINGS["package-dir"]}
"""Our folders in the repository by the names of their packages."""


def built(folder: Path) -> list[str]:
    """Names of the files in a wheel that is built of the tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    # A copy, since setuptools leaves a folder `build` in the tree, and takes what lies there for its own.
    source = folder / "tree"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS.values()):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source / name)], check=True)
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = folder.glob("*.whl")
    return zipfile.ZipFile(made).namelist()


def test_a_wheel_has_one_name_at_the_top_with_every_module_and_what_programs_read(tmp_path: Path) -> None:
    wheel = built(tmp_path)
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"grpo"}
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS.values()],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    listed = [name for name in listed if not name.startswith("docs/") or name.endswith(".md")]  # no pictures
    installed = {name if name.startswith("grpo/") else f"grpo/{name}" for name in listed if (ROOT / name).exists()}
    assert installed - set(wheel) == set()
