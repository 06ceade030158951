"""What is installed from a wheel, outside the checkout, trains."""

import json
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, timeout_s: float = 550) -> str:
    """What a command prints; it must come to a good end."""
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment that has the wheel, and sees the libraries of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "source" / name)
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source", cwd=folder)
    shutil.rmtree(folder / "source")
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "empty", with_pip=False)
    (packages,) = (folder / "empty").glob("lib/python*/site-packages")
    run(*pip, "--python", folder / "empty/bin/python", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    return folder / "empty/bin"


def test_the_programs_are_there_and_their_modules_are_those_of_the_wheel(programs: Path, tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in scripts:
        assert run(programs / name, "--help", cwd=tmp_path)
    modules = {entry.partition(":")[0] for entry in scripts.values()}
    code = f"import importlib; print([importlib.import_module(name).__file__ for name in {sorted(modules)}])"
    places = run(programs / "python", "-c", code, cwd=tmp_path)
    assert places.count(str(programs.parent)) == len(modules)


def test_the_quickstart_learns(programs: Path, tmp_path: Path) -> None:
    run(programs / "grpo", "quickstart", "--output_dir", "first", "--max_steps", "14", cwd=tmp_path)
    summary = json.loads((tmp_path / "first/summary.json").read_text())
    assert summary["steps"] == 14
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    run(programs / "grpo", "ledger", "first", "--check", cwd=tmp_path)
