"""Names of built-in environments, and of packages of the `verifiers` registry."""

from pathlib import Path
from typing import Any

import pytest
from grpo.environments import BUILT_IN
from grpo.orchestrator.rollouts.registry import check_id, find_class
from grpo.transport.errors import UserError

from tests.orchestrator.registered import install


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"verifiers"}))
def test_what_is_built_in_is_found(name: str) -> None:
    if name == "textarena":
        pytest.importorskip("textarena", reason="the extra textarena is not installed")
    check_id(name)
    assert f"{find_class(name).__module__}:{find_class(name).__name__}" == BUILT_IN[name]


def test_a_package_that_registers_a_built_in_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "sums", "arithmetic = sums:Sums")
    with pytest.raises(UserError, match=r"\bsums\b.*\bgrpo\b"):
        check_id("arithmetic")


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ("reverse-text", {"min_lenn": 3}, "did you mean min_len"),
        ("dataset", {}, "'path' is missing"),
        ("dataset", {"path": "no.csv"}, "no such file"),
        ("reverse-text", {"min_len": 3}, None),
        ("dataset", {"path": "openai/gsm8k"}, None),
    ],
)
def test_arguments_that_a_built_in_environment_does_not_take_are_refused(
    env: str, args: dict[str, Any], said: str | None
) -> None:
    if said is None:
        check_id(env, args)
        return
    with pytest.raises(UserError, match=said):
        check_id(env, args)


CLASSIC = "import verifiers as vf\n\ndef load_environment(**kwargs):\n    raise SystemExit('it runs')\n"


@pytest.mark.parametrize(("env_id", "args"), [("me/classic-sums@1.0", {}), ("verifiers", {"env_id": "classic-sums"})])
def test_a_package_for_an_older_verifiers_is_refused_before_it_is_imported(
    env_id: str, args: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "classic_sums.py").write_text(CLASSIC)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"0\.4"):
        check_id(env_id, args)
    (tmp_path / "classic_sums.py").write_text(f"__all__ = ['Sums']\n{CLASSIC}")  # both
    check_id(env_id, args)
