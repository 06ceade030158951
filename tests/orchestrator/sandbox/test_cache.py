"""Programs that say the same share a result."""

import sqlite3
from pathlib import Path

import pytest

from orchestrator.sandbox import ResultCache
from orchestrator.sandbox import cache as cache_file
from orchestrator.sandbox.cache import key_of, normalised

PLAIN = "def double(x):\n    return 2 * x\n"
DRESSED = '''"""A module."""
# a comment
def double( x ):
    """Twice x."""
    return (2*x)   # so
'''


def test_comments_documentation_and_formatting_make_no_difference() -> None:
    assert normalised(DRESSED) == normalised(PLAIN) == "def double(x):\n    return 2 * x"
    assert key_of(DRESSED, "tests") == key_of(PLAIN, "tests")
    assert normalised('class A:\n    """Doc."""\n') == "class A:\n    pass"
    assert normalised('"""Doc."""') == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((PLAIN, "t"), (PLAIN.replace("2", "3"), "t")),
        ((PLAIN, "t"), (PLAIN.replace("x", "y"), "t")),
        (("def f():\n    'doc'", "t"), ("def f():\n    return 'doc'", "t")),
        ((PLAIN, "a"), (PLAIN, "b")),
        (("x = 1", "2"), ("x = 12", "")),
    ],
)
def test_programs_that_may_behave_differently_and_tests_differ(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert key_of(*one) != key_of(*other)


@pytest.mark.parametrize("text", ["def f(:", "a\0b", "(" * 5000, "-" * 20000 + "1", "\ud800", "x=1\n" * 50_000])
def test_any_text_has_a_key_and_stays_as_it_is(text: str) -> None:
    assert key_of(text, "t") == key_of(text, "t")
    assert normalised(text) == text


def test_hits_and_misses_are_counted_and_a_value_of_zero_is_a_hit() -> None:
    cache = ResultCache(float)
    assert cache.get(PLAIN, "t") is None
    cache.put(PLAIN, "t", 0.0)
    assert cache.get(DRESSED, "t") == 0.0
    assert cache.get(PLAIN, "other") is None
    assert (cache.num_hits, cache.num_misses) == (1, 2)
    cache.close()


def test_a_file_may_be_shared_and_outlives_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "outputs" / "cache.sqlite"
    cache, other = ResultCache(tuple[bool, ...], path=path), ResultCache(tuple[bool, ...], path=path)
    cache.put("a = 1", "t", (True, False))
    assert other.get("a = 1  # the same", "t") == (True, False)
    cache.close()
    other.close()
    assert ResultCache(tuple[bool, ...], path=path).get("a = 1", "t") == (True, False)


def test_a_file_that_is_no_cache_or_that_others_hold_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "BUSY_S", 0.0)
    (tmp_path / "none.sqlite").write_text("something else, which nobody takes for an empty database" * 20)
    (tmp_path / "file").write_text("")
    held = sqlite3.connect(tmp_path / "held.sqlite", isolation_level=None)
    held.execute("BEGIN EXCLUSIVE")
    for name in ("none.sqlite", "file/cache.sqlite", "held.sqlite"):
        with pytest.raises(ValueError, match=name):
            ResultCache(float, path=tmp_path / name)
    held.close()
