"""Packages that register environments by entry points."""

from pathlib import Path


def install(folder: Path, package: str, names: str, code: str = "") -> None:
    """A package of one module, as pip leaves it in site-packages. `names`: lines `NAME = MODULE:CLASS`."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[grpo.environments]\n{names}\n")
    (folder / f"{package}.py").write_text(code)
