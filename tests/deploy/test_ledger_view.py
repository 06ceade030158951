"""`grpo ledger`: what became of rollouts, groups, prompts and steps."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.ledger_view import LedgerError, main, open_ledger
from orchestrator.envs.reverse_text import ReverseText
from tests.deploy.run_folder import found, write_ledger

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = found(tmp_path / "run")
    write_ledger(folder)
    return folder


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Ask]:
    """The exit code and the JSON answer to a question."""

    def answer(*question: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([str(run), *question, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return answer


def test_totals_are_by_state_and_reason(ask: Ask, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, totals = ask()
    assert (code, totals["rollouts"], totals["groups"], totals["step"]) == (0, 10, 5, 2)
    assert totals["states"] == {"trained": 7, "dropped": 3}
    assert totals["dropped"] == {"env_error": 2, "repetition": 1}
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith("10 rollouts in 5 groups, up to step 2\n  dropped ")


def test_a_group_shows_each_of_its_rollouts(ask: Ask) -> None:
    code, answer = ask("--group", "2")
    assert code == 0
    fates = [(row["id"], row["state"], row["reason"], row["step"], row["lag"]) for row in answer["rollouts"]]
    assert fates == [("2/0", "trained", None, 2, 0), ("2/1", "dropped", "repetition", None, None)]


def test_a_rollout_is_told_in_a_line(ask: Ask, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask("--rollout", "3/1")
    assert code == 0
    (row,) = answer["rollouts"]
    assert (row["reward"], row["num_tokens"], row["version"], row["lag"], row["example"]) == (0.0, 5, 0, 1, 7)
    assert row["issued_at"] <= row["changed_at"]
    main([str(run), "--rollout", "3/1"])
    said = "trained in step 2, lag 1; reward 0, 5 tokens; reverse-text 7 under version 0; issued "
    assert said in capsys.readouterr().out


def test_a_step_shows_what_trained_it(ask: Ask, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = ask("--step", "2")
    assert (code, answer["groups"], answer["states"], answer["lags"]) == (0, 2, {"trained": 3}, {"0": 1, "1": 2})
    assert [row["id"] for row in answer["rollouts"]] == ["2/0", "3/0", "3/1"]
    assert answer["mean_reward"] == pytest.approx(1 / 3)  # (1 + 0 + 0) / 3
    assert answer["sampled_tokens"] == 4 + 4 + 5
    main([str(run), "--step", "2"])
    assert "step 2: 3 rollouts of 2 groups, 3 trained; mean reward 0.3333" in capsys.readouterr().out


def test_a_prompt_shows_every_group_that_asked_it(ask: Ask) -> None:
    code, answer = ask("--env", "reverse-text", "--example", "5")
    assert code == 0
    assert [row["id"] for row in answer["prompts"][0]["rollouts"]] == ["0/0", "0/1", "2/0", "2/1"]


def test_a_prompt_is_found_by_its_text(ask: Ask) -> None:
    prompt = ReverseText(num_train=20).dataset("train")[5]["prompt"]
    code, answer = ask("--prompt", prompt)
    assert code == 0
    assert [(one["example"], one["prompt"], len(one["rollouts"])) for one in answer["prompts"]] == [(5, prompt, 4)]


@pytest.mark.parametrize(
    "question", [("--group", "9"), ("--rollout", "0/7"), ("--step", "3"), ("--env", "reverse-text", "--example", "11")]
)
def test_what_is_not_in_the_ledger_gives_exit_code_1(ask: Ask, question: tuple[str, ...]) -> None:
    assert ask(*question)[0] == 1


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (("--env", "reverse-text"), "--env and --example belong together"),
        (("--prompt", "no prompt has this"), "no training prompt contains 'no prompt has this'"),
        (("--group", "1", "--step", "1"), "not allowed with"),
    ],
)
def test_questions_that_make_no_sense_give_exit_code_2(
    run: Path, capsys: pytest.CaptureFixture[str], question: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(run), *question])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no such file; give the output_dir of a run"), open_ledger(tmp_path):
        pass
    (tmp_path / "ledger.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(LedgerError, match="is not a ledger"), open_ledger(tmp_path):
        pass
    (tmp_path / "ledger.sqlite").write_bytes(b"")
    with pytest.raises(LedgerError, match="has no rollouts yet"), open_ledger(tmp_path):
        pass


def test_a_ledger_that_is_being_written_is_read_as_it_was_last_committed(tmp_path: Path) -> None:
    folder = found(tmp_path / "living")
    ledger = write_ledger(folder, close=False)
    ledger.issued(5, num=2, env="reverse-text", example=1, version=2)
    with open_ledger(folder) as database:
        count = "SELECT COUNT(*) FROM rollouts"
        assert database.execute(count).fetchone() == (10,)
        ledger.changes()()
        assert database.execute(count).fetchone() == (12,)
    ledger.close()


def test_the_ledger_cannot_be_changed_by_looking(run: Path) -> None:
    with open_ledger(run) as database, pytest.raises(sqlite3.OperationalError, match="readonly"):
        database.execute("DELETE FROM rollouts")


def test_a_query_that_takes_too_long_is_given_up(run: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"), open_ledger(run, limit_s=0.05) as database:
        database.execute(endless).fetchone()


def test_an_environment_that_cannot_be_constructed_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads((run / "run.json").read_text())
    fields["programs"]["orch"]["settings"]["env"] = [{"id": "no-such-environment", "name": None, "args": {}}]
    (run / "run.json").write_text(json.dumps(fields))
    with pytest.raises(SystemExit):
        main([str(run), "--prompt", "word"])
    message = "environment no-such-environment cannot be constructed here: unknown env.id"
    assert message in capsys.readouterr().err
