"""`grpo ratings`: strengths and matrix from the games in the ledger."""

import argparse
import json
from pathlib import Path

import pytest
from grpo.orchestrator.ledger import Game, Ledger

from grpo.commands.ratings import main


def write_games(folder: Path, results: dict[tuple[str, str], str], *, env: str = "nim") -> None:
    """Each letter of `results` is a game: w, d or l, or r, one that a killed process has begun and won."""
    ledger = Ledger(folder / "ledger.sqlite")
    for group, ((player, other), letters) in enumerate(results.items()):
        ledger.issued(group, num=len(letters), env=env, example=0, version=0)
        for number, letter in enumerate(letters):
            ledger.scored(f"{group}/{number}", reward=0.0, num_tokens=1)
            score = {"w": 1.0, "d": 0.5, "l": 0.0, "r": 1.0}[letter]
            sides = {"player": player, "digest": "xxh3_128:a", "other": other, "other_digest": "xxh3_128:b"}
            roles = {"role": "first", "other_role": "second"}
            ledger.played([Game(group_id=group, number=number, place="", env=env, score=score, **sides, **roles)])
        left = [f"{group}/{number}" for number, letter in enumerate(letters) if letter != "r"]
        ledger.shipping(left, group + 1, state={}, metrics={})()
        ledger.dropped([f"{group}/{number}" for number, letter in enumerate(letters) if letter == "r"], "restarted")
    ledger.close()


def asked(folder: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> tuple[int, str]:
    code = main(argparse.Namespace(run=folder, json=as_json))
    return code, capsys.readouterr().out


def test_players_are_ordered_by_all_games_and_base_is_the_anchor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_games(tmp_path, {("v5", "base"): "wwwwlwwd", ("v10", "base"): "wwwwwwwl", ("v10", "v5"): "wwwl" + "r" * 9})
    code, out = asked(tmp_path, capsys, as_json=True)
    [table] = json.loads(out)["games"]
    assert code == 0
    assert table["env"] == "nim"
    assert table["num_games"] == 20  # without those that are rolled out again
    assert [one["name"] for one in table["players"]] == ["v10", "v5", "base"]
    assert table["players"][-1]["elo"] == table["players"][-1]["sigma"] == 0.0
    assert {"player": "v5", "other": "v10", "won": 1, "drawn": 0, "lost": 3} in table["pairs"]
    code, out = asked(tmp_path, capsys, as_json=False)
    assert code == 0
    assert "75%" in out


def test_cycles_and_the_judge_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    circle = {("v1", "v2"): "w" * 40, ("v2", "v3"): "w" * 40, ("v3", "v1"): "w" * 40}
    write_games(tmp_path, circle | {("v8", "v1"): "w" * 60 + "l" * 4})
    lines = [{"progress/step": step, "eval/measure/nash_conv/nim": value} for step, value in ((1, 0.2), (8, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (tmp_path / "run.json").write_text("{}")
    _, out = asked(tmp_path, capsys, as_json=True)
    [table] = json.loads(out)["games"]
    assert {(one["player"], one["other"]) for one in table["cycles"]} == {("v1", "v2"), ("v2", "v3"), ("v1", "v3")}
    assert table["judged"] == {"1": 0.2, "8": 0.5}
    [one] = table["disagree"]
    assert (one["earlier"], one["later"]) == (1, 8)
    assert one["elo"] > 0 < one["nash_conv"]


def test_a_run_without_games_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_games(tmp_path, {})
    code, out = asked(tmp_path, capsys, as_json=False)
    assert code == 0
    assert "no games" in out
