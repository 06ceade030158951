"""What programs tell people: texts of others cannot act on a terminal, and a run keeps the warnings of its programs."""

import logging
import traceback
from pathlib import Path

import pytest
from grpo.transport.logs import printable, start_log
from grpo.transport.run_warnings import MAX_KINDS, as_line, kept_warnings, run_warnings

OSC, CSI, C1 = "\x1b]0;title\x07", "\x1b[2J\x1b[1;1H", "\x9b2J\x90q\x9c"
HOSTILE = f"a{OSC}b{CSI}c{C1}d\u202ee\u2066f\rg\x7fh\u200bi\udce9"


@pytest.mark.parametrize("text", [OSC, CSI, C1, "\u202eabc", "\r", "\x08", "\u2028", "\ud800", HOSTILE])
def test_no_text_of_others_acts_on_a_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown
    shown.encode()


@pytest.mark.parametrize("text", ["", "a\tb\nc", "naïve 東京 🙂 👩\u200d💻 می\u200cخواهم", "\\x1b[2J"])
def test_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.json").touch()
    return tmp_path


log = logging.getLogger("grpo.orchestrator.some.module")


def test_a_log_line_is_printable(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "root", root := logging.RootLogger(logging.WARNING))
    start_log(who="rank 1: ")
    root.warning("environment: %s", HOSTILE)
    line = capfd.readouterr().err.removesuffix("\n")
    assert line.isprintable()
    assert "rank 1: environment: a\\x1b]0" in line


def test_each_kind_of_warning_is_kept_once_with_its_first_step_and_its_number(run: Path) -> None:
    steps = iter([1, 2, 3])
    with kept_warnings(run, "orch", step=lambda: next(steps)):
        for batch in (1, 2, 10):
            log.warning("in %.1f %% of the groups of batch %d all rewards are equal", 100 / batch, batch)
        log.error("something\nelse%s", OSC)
        log.info("no warning")
        logging.getLogger("vllm").warning("of another library")
    groups, other = run_warnings(run)
    assert as_line(groups) == "grpo-orch, step 1, 3 times: in 100.0 % of the groups of batch 1 all rewards are equal"
    assert (other.step, other.times) == (2, 1)
    assert as_line(other).isprintable()


def test_warnings_of_endless_kinds_are_bounded_and_counted_also_by_a_program_that_is_started_again(run: Path) -> None:
    for num_starts in (1, 2):
        with kept_warnings(run, "train"):
            for number in range(MAX_KINDS + 30):
                log.warning("kind %s", "x" * number)
        kept = run_warnings(run)
        assert (len(kept), sum(one.times for one in kept)) == (MAX_KINDS + 1, num_starts * (MAX_KINDS + 30))
        assert (kept[0].program, kept[0].times) == ("grpo-train", num_starts)


def test_of_a_traceback_the_error_and_its_place_are_kept(run: Path) -> None:
    with kept_warnings(run, "orch"):
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.warning("rollout 7 failed: %s", traceback.format_exc())
    [one] = run_warnings(run)
    assert one.message.startswith(f'rollout 7 failed: ValueError: first\nsecond ("{__file__}", line ')


@pytest.mark.parametrize("text", ["", "5", '[{"program": 5}]', "[" * 10**5])
def test_a_damaged_file_counts_as_none(run: Path, text: str) -> None:
    (run / "warnings").mkdir()
    (run / "warnings" / "orch.json").write_text(text)
    assert run_warnings(run) == []
    with kept_warnings(run, "orch"):
        log.warning("one")
    assert [one.message for one in run_warnings(run)] == ["one"]


def test_where_there_is_no_run_nothing_is_written(tmp_path: Path) -> None:
    with kept_warnings(tmp_path, "infer"):
        log.warning("one")
    assert list(tmp_path.iterdir()) == []
