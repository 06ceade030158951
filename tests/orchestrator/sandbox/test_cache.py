"""Programs that say the same share a result."""

import sqlite3
from pathlib import Path

import pytest

from orchestrator.sandbox import ResultCache
from orchestrator.sandbox import cache as cache_file
from orchestrator.sandbox.cache import key_of
from orchestrator.sandbox.normalise import normalised

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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PLAIN, PLAIN.replace("2", "3")),
        (PLAIN, PLAIN.replace("x", "y")),
        ("print('a')", "print('b')"),
        ("def f():\n    'doc'", "def f():\n    return 'doc'"),
    ],
)
def test_programs_that_may_behave_differently_differ(one: str, other: str) -> None:
    assert key_of(one, "tests") != key_of(other, "tests")


def test_tests_and_programs_are_not_mixed_up() -> None:
    assert key_of(PLAIN, "a") != key_of(PLAIN, "b")
    assert key_of("x = 1", "2") != key_of("x = 12", "")


@pytest.mark.parametrize("text", ["def f(:", "x = '\\d'", "a\0b", "(" * 5000, "-" * 20000 + "1", "\ud800"])
def test_any_text_has_a_key(text: str) -> None:
    assert key_of(text, "t") == key_of(text, "t")


def test_a_body_of_documentation_alone_stays_a_body() -> None:
    assert normalised('class A:\n    """Doc."""\n') == "class A:\n    pass"
    assert normalised('"""Doc."""') == ""


def test_hits_and_misses_are_counted_and_a_value_of_zero_is_a_hit() -> None:
    cache = ResultCache(float)
    assert cache.get(PLAIN, "t") is None
    cache.put(PLAIN, "t", 0.0)
    assert cache.get(DRESSED, "t") == 0.0
    assert cache.get(PLAIN, "other") is None
    assert (cache.num_hits, cache.num_misses) == (1, 2)


def test_memory_keeps_the_entries_used_last() -> None:
    cache = ResultCache(int, entries=2)
    cache.put("a = 1", "t", 1)
    cache.put("b = 2", "t", 2)
    assert cache.get("a = 1", "t") == 1
    cache.put("c = 3", "t", 3)
    assert [cache.get(program, "t") for program in ("a = 1", "b = 2", "c = 3")] == [1, None, 3]


def test_a_file_outlives_the_cache_and_what_memory_forgets(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    cache = ResultCache(tuple[bool, ...], entries=1, path=path)
    cache.put("a = 1", "t", (True, False))
    cache.put("b = 2", "t", ())
    assert cache.get("a = 1", "t") == (True, False)
    other = ResultCache(tuple[bool, ...], path=path)
    assert other.get("b = 2  # the same", "t") == ()
    cache.close()
    other.close()


def test_a_file_that_others_open_at_the_same_time_is_opened_when_they_have_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "BUSY_S", 5.0)
    path, prepared, tries = tmp_path / "cache.sqlite", cache_file._prepared, []
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    def at_once(path: Path, wait_s: float) -> sqlite3.Connection:
        tries.append(wait_s)
        if len(tries) == 3:
            other.execute("COMMIT")
        return prepared(path, 0.0)

    monkeypatch.setattr(cache_file, "_prepared", at_once)
    cache = ResultCache(float, path=path)
    assert 5.0 > tries[0] > tries[1] > tries[2] > 0.0  # what is left of the time
    assert cache._file is not None
    assert cache._file.execute("PRAGMA busy_timeout").fetchone() == (5000,)
    cache.close()
    other.close()


def test_a_new_file_that_is_not_let_go_of_is_named_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "BUSY_S", 0.0)
    with sqlite3.connect(tmp_path / "cache.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TimeoutError, match=r"other processes to let go of the cache .*cache\.sqlite"):
            ResultCache(float, path=tmp_path / "cache.sqlite")
    other.close()


def test_the_folder_of_a_file_is_made_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    ResultCache(float, path=tmp_path / "outputs" / "cache.sqlite").close()
    assert (tmp_path / "outputs" / "cache.sqlite").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/cache\.sqlite cannot be opened: File exists"):
        ResultCache(float, path=tmp_path / "file" / "cache.sqlite")
    with pytest.raises(ValueError, match=r"outputs cannot be opened: unable to open database file"):
        ResultCache(float, path=tmp_path / "outputs")


def test_a_cache_that_cannot_be_written_is_not_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    ResultCache(float, path=path).close()
    content = bytearray(path.read_bytes())
    content[18:20] = (
        3,
        1,
    )  # the versions for writers and readers: what is of a later one, SQLite reads and does not write
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the cache .*cannot be opened: attempt to write a readonly database; may"):
        ResultCache(float, path=path)


def test_a_program_that_takes_long_to_parse_is_compared_as_it_is() -> None:
    program = "x=1\n" * 50_000
    assert normalised(program) == program


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    path.write_text("something else, and long enough that nobody takes it for an empty database" * 20)
    with pytest.raises(ValueError, match=r"cache\.sqlite is not a cache of sandbox results .*remove it"):
        ResultCache(float, path=path)
