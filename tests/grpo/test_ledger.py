"""`grpo ledger`: what became of rollouts, groups, prompts and steps."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo.environments.reverse_text import ReverseText
from grpo.orchestrator.ledger_reader import open_ledger
from grpo.transport.errors import UserError

from tests.grpo.run_folder import found, grpo, write_ledger

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = found(tmp_path / "run")
    write_ledger(folder)
    return folder


@pytest.fixture
def ask(run: Path) -> Ask:
    """The exit code and the JSON answer to a question, which has an answer in words too."""

    def answer(*question: str) -> tuple[int, Any]:
        in_words = grpo("ledger", run, *question)
        done = grpo("ledger", run, *question, "--json")
        assert in_words.stdout
        assert in_words.returncode == done.returncode
        return done.returncode, json.loads(done.stdout)

    return answer


def test_totals_groups_rollouts_and_steps_are_told(ask: Ask) -> None:
    code, totals = ask()
    assert (code, totals["rollouts"], totals["groups"], totals["step"]) == (0, 10, 5, 2)
    assert totals["states"] == {"trained": 7, "dropped": 3}
    assert totals["dropped"] == {"env_error": 2, "repetition": 1}
    code, answer = ask("--group", "2")
    fates = [(row["id"], row["state"], row["reason"], row["step"], row["lag"]) for row in answer["rollouts"]]
    assert code == 0
    assert fates == [("2/0", "trained", None, 2, 0), ("2/1", "dropped", "repetition", None, None)]
    code, answer = ask("--rollout", "3/1")
    (row,) = answer["rollouts"]
    assert code == 0
    assert (row["reward"], row["num_tokens"], row["version"], row["lag"], row["example"]) == (0.0, 5, 0, 1, 7)
    assert row["issued_at"] <= row["changed_at"]
    code, answer = ask("--step", "2")
    assert (code, answer["groups"], answer["states"], answer["lags"]) == (0, 2, {"trained": 3}, {"0": 1, "1": 2})
    assert [row["id"] for row in answer["rollouts"]] == ["2/0", "3/0", "3/1"]
    assert answer["mean_reward"] == pytest.approx(1 / 3)  # (1 + 0 + 0) / 3
    assert answer["sampled_tokens"] == 4 + 4 + 5


def test_a_prompt_shows_every_group_that_asked_it_and_is_found_by_its_text(ask: Ask) -> None:
    prompt = ReverseText(num_train=20).dataset("train")[5]["prompt"]
    code, by_number = ask("--example", "reverse-text/5")
    assert (code, by_number["groups"]) == (0, 2)
    code, by_text = ask("--prompt", prompt)
    assert code == 0
    for answer in (by_number, by_text["prompts"][0]):
        assert [row["id"] for row in answer["rollouts"]] == ["0/0", "0/1", "2/0", "2/1"]


@pytest.mark.parametrize("question", ["--group 9", "--rollout 0/7", f"--step {2**63 - 1}", "--example x/11"])
def test_what_is_not_in_the_ledger_gives_exit_code_1(ask: Ask, question: str) -> None:
    assert ask(*question.split())[0] == 1


@pytest.mark.parametrize(
    "question", ["--example reverse-text", "--prompt none", "--group 1 --step 1", f"--group {10**20}", "--rollout 17"]
)
def test_questions_that_make_no_sense_give_exit_code_2(run: Path, question: str) -> None:
    assert grpo("ledger", run, *question.split()).returncode == 2


@pytest.mark.parametrize("content", [None, b"", b"something else" * 100])
def test_what_is_no_ledger_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "ledger.sqlite").write_bytes(content)
    with pytest.raises(UserError, match=r"ledger\.sqlite"), open_ledger(tmp_path):
        pass


def test_a_damaged_row_is_an_error_of_the_ledger(run: Path) -> None:
    with sqlite3.connect(run / "ledger.sqlite") as database:
        database.execute("UPDATE rollouts SET reward = 'much' WHERE id = '0/0'")
    assert grpo("ledger", run, "--rollout", "0/0").returncode == 2


def test_a_ledger_that_is_being_written_is_read_as_it_was_last_committed(tmp_path: Path) -> None:
    folder = found(tmp_path / "living")
    ledger = write_ledger(folder, close=False)
    ledger.issued(5, num=2, env="reverse-text", example=1, version=2)
    with open_ledger(folder) as reader:
        assert reader.fates().total() == 10
        ledger.changes()()
        assert reader.fates().total() == 12
    ledger.close()


def test_steps_are_those_of_an_example_and_the_newest_or_the_newest_that_has_left(tmp_path: Path) -> None:
    folder = found(tmp_path / "living")
    ledger = write_ledger(folder, close=False)
    ledger.issued(5, num=1, env="reverse-text", example=6, version=2)
    ledger.scored("5/0", reward=1.0, num_tokens=3)
    ledger.shipping(["5/0"], 3, state={}, metrics={})()
    with open_ledger(folder) as reader:
        assert (reader.newest_step(), reader.newest_step(has_left=True)) == (3, 2)
        assert [reader.steps_of("reverse-text", example) for example in (5, 6, 7)] == [{1, 2}, {1, 3}, {2}]
        assert reader.steps_of("other", 5) == set()
    ledger.close()


def test_the_ledger_cannot_be_changed_by_looking(run: Path) -> None:
    with open_ledger(run) as ledger, pytest.raises(sqlite3.OperationalError):
        ledger._rows("DELETE FROM rollouts")


def test_a_query_that_takes_too_long_is_given_up(run: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted"), open_ledger(run, limit_s=0.05) as ledger:
        ledger._rows(endless)


def test_an_environment_that_cannot_be_constructed_is_named(run: Path) -> None:
    fields = json.loads((run / "run.json").read_text())
    fields["programs"]["orch"]["settings"]["env"] = [{"id": "no-such-environment", "name": None, "args": {}}]
    (run / "run.json").write_text(json.dumps(fields))
    done = grpo("ledger", run, "--prompt", "word")
    assert done.returncode == 2
    assert "no-such-environment" in done.stderr
