"""What the program behind the page answers, and to whom."""

import http.client
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from grpo.transport.traces import SCHEMA, make_table, trace_path, write_table

from grpo.view.traces import texts_of
from tests.grpo.run_folder import grpo
from tests.grpo.view.made_run import HOSTILE, WORDS, make_run, trace
from tests.grpo.view.served import Served, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and a folder that is none."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one")
    make_run(root / "hostile", steps=3, text=HOSTILE)
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def view(folder: Path) -> Iterator[Served]:
    with served(folder) as one:
        yield one


def test_runs_of_a_folder_are_found(view: Served) -> None:
    runs = {run["name"]: run for run in view.json("runs")}
    assert runs.keys() == {"one", "hostile"}
    assert (runs["one"]["step"], runs["one"]["traced"], runs["one"]["evaluated"]) == (6, [1, 2, 3, 4, 5, 6], [0, 6])


def test_a_step_has_its_rollouts_without_tokens_and_a_rollout_a_value_for_each_token_and_its_pairs(
    view: Served,
) -> None:
    rows = view.json("runs/one/step/2/rollouts")["rollouts"]
    assert len(rows) == 16
    assert rows[0]["rollout"] == "0/0"
    assert rows[0]["max_log_ratio"] == pytest.approx(3.0)
    assert "token_ids" not in rows[0]
    (row,) = view.json("runs/one/step/2/rollouts/0/0")
    columns = ("tokens", "token_ids", "logprobs", "trainer_logprobs", "entropy", "masked")
    assert {len(row[name]) for name in columns} == {40}
    assert row["trainer_logprobs"][-1] - row["logprobs"][-1] == pytest.approx(3.0, abs=1e-4)
    assert row["mask_names"][row["masked"][-1]] == "token_high"
    assert view.json("runs/one/step/1/rollouts/0/1")[0]["pairs"][0]["chosen"] == "better"
    assert view.json("runs/one/step/1/rollouts/0/2")[0]["pairs"] == []


def test_prompts_answers_and_right_answers_of_chosen_rollouts_are_told(view: Served) -> None:
    told = view.json("runs/one/step/2/texts?rollouts=0/1,3/2&tokens=true")
    assert told.keys() == {"0/1", "3/2"}
    assert (told["0/1"]["prompt"], told["0/1"]["answer"], told["0/1"]["right"]) == (
        "Say it.",
        "so be it 1",
        "so be it 1",
    )
    assert (len(told["0/1"]["tokens"]), told["0/1"]["equal"]) == (30, True)
    assert len(view.json("runs/one/eval/6/texts")) == 8


def test_of_datums_without_messages_the_tokens_tell_prompt_and_answer(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1)
    rows = [row | {"messages": None} for row in trace(1, 1, 1, 40, "x").to_pylist()]
    write_table(make_table(rows, SCHEMA), trace_path(run, 1))
    words = [WORDS[one] for one in rows[0]["token_ids"]]
    given = rows[0]["loss_mask"].index(True)
    told = texts_of(run, 1, None)["0/0"]
    assert 0 < given < 40
    assert (told["prompt"], told["answer"]) == ("".join(words[:given]), "".join(words[given:]))


@pytest.mark.parametrize(("text", "found"), [("BE IT 3", 4), ("say it", 16), ("nothing", 0), ('"', 0), ("it\\\\d", 0)])
def test_a_text_is_found_in_conversations_and_examples(view: Served, text: str, found: int) -> None:
    assert len(view.json(f"runs/one/step/2/find?text={quote(text)}")) == found


def test_the_worst_tokens_of_a_step_come_from_all_its_rollouts(view: Served) -> None:
    tokens = view.json("runs/one/step/2/tokens?by=log-ratio")
    assert (tokens[0]["rollout"], tokens[0]["at"], tokens[0]["value"]) == ("0/0", 39, pytest.approx(3.0, abs=1e-4))
    assert tokens[0]["text"] in tokens[0]["before"] + tokens[0]["text"] + tokens[0]["after"]
    entropies = [one["value"] for one in view.json("runs/one/step/2/tokens?by=entropy")]
    assert entropies == sorted(entropies, reverse=True)
    assert len({one["rollout"] for one in view.json("runs/one/step/2/tokens?by=entropy")}) > 5
    assert view.json("runs/one/step/2/tokens?by=teacher") == []


def test_a_prompt_is_followed_over_steps_and_evaluations(view: Served) -> None:
    told = view.json("runs/one/prompt?env=reverse-text&example=3")
    assert {row["example"] for row in told["train"]} == {3}
    assert told["train"][0]["messages"][-1]["role"] == "assistant"
    assert view.get(f"/api/runs/one/prompt?env=reverse-text&example={10**20}")[0] == 404


def test_evaluations_are_compared_by_example(view: Served) -> None:
    told = view.json("runs/one/evaluation")
    assert told["compared"] == [0, 6]
    for version, by_k in told["pass"].items():
        rows = view.json(f"runs/one/eval/{version}/rollouts")["rollouts"]
        assert by_k["1"] == pytest.approx(sum(row["accuracy"] for row in rows) / len(rows))
        assert by_k["2"] >= by_k["1"]


def test_ratings_and_the_newest_games_are_told(view: Served) -> None:
    [table] = view.json("runs/one/games")
    assert table["env"] == "reverse-text"
    assert {"v1", "v2", "base"} <= {one["name"] for one in table["players"]}
    assert table["newest"][0]["step"] == 6
    assert table["newest"][0]["player"] == "v5"


def test_timeline_and_proof_are_told(view: Served) -> None:
    told = view.json("runs/one/timeline")
    assert [lane["who"] for lane in told["lanes"]] == ["grpo-infer http://127.0.0.1:1", "grpo-train"]
    assert told["lanes"][1]["busy"] == pytest.approx(6 * 0.4 / 5.9)
    told = view.json("runs/one/proof")
    facts = {part["name"]: part["facts"] for part in told["parts"]}
    assert facts["rollouts"]["states"] == {"trained": 96}
    assert [one["max_abs"] for one in facts["versions"]["canaries"] if one["version"] == 2] == [2e-5, 2e-5]


@pytest.mark.parametrize(
    "path", ["runs/none/curves", "runs/one/step/x/rollouts", "runs/..%2f..%2fetc/curves", "nothing"]
)
def test_what_is_not_there_is_said(view: Served, path: str) -> None:
    assert view.get(f"/api/{path}")[0] in (404, 422)


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/../../etc/passwd", "/server.py"]
)
def test_only_the_pages_own_files_are_served(view: Served, path: str) -> None:
    assert view.get(path)[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Cookie": "grpo-view-1=x"}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
def test_without_the_token_or_from_elsewhere_nothing_is_told(
    view: Served, headers: dict[str, str], status: int
) -> None:
    for path in ("/", "/api/runs", "/api/events", "/static/app.js"):
        assert view.get(path, headers=headers)[0] == status
    if status == 403:
        assert view.get("/api/runs", headers=headers | {"Cookie": f"grpo-view-{view.port}={view.token}"})[0] == 403


def test_nothing_can_be_written(view: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert view.get("/api/runs", method=method)[0] == 405


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    secret = tmp_path / "secret.jsonl"
    secret.write_text((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(secret)
    shutil.move(run / "traces", tmp_path / "elsewhere")
    (run / "traces").symlink_to(tmp_path / "elsewhere")
    with served(run) as view:
        assert view.json("runs/run/curves")["train"] == {}
        assert view.json("runs/run/step/1/rollouts")["rollouts"] == []


def test_two_hundred_pages_may_listen(view: Served) -> None:
    """They hold up nobody, and what they cost ends with them."""

    def listen(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", view.port, timeout=120)
        connection.request("GET", "/api/events", headers={"Cookie": f"grpo-view-{view.port}={view.token}"})
        status = connection.getresponse().status
        connections.append(connection)
        return status

    connections: list[http.client.HTTPConnection] = []
    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(listen, range(200))) == {200}
    assert len(view.json("runs")) == 2
    for connection in connections:
        connection.close()


def test_a_folder_without_runs_is_an_empty_table_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as view:
        assert view.json("runs") == []
    assert grpo("view", tmp_path / "none").returncode == 2


def test_a_report_has_the_answers_and_no_markup_of_rollouts(tmp_path: Path, folder: Path) -> None:
    assert grpo("view", folder, "--export", tmp_path / "report.html").returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in page
    embedded = page.partition('id="answers">')[2].partition("</script>")[0]
    answers = json.loads(embedded)
    assert HOSTILE in answers["runs/hostile/step/3/rollouts/0/0"][0]["messages"][1]["content"]
    assert "http://" not in page.partition('id="answers">')[0]


def test_a_large_run_is_read_within_its_limits(tmp_path: Path) -> None:
    """A thousand steps of 512 rollouts of 2,000 tokens, and one of 32,000: memory stays below 300 MB."""
    make_run(tmp_path / "large", steps=1000, groups=64, size=8, tokens=2000)
    make_run(tmp_path / "long", steps=2, groups=1, size=2, tokens=32_000)
    with served(tmp_path) as view:
        for path in ("curves", "timeline", "proof", "prompt?env=reverse-text&example=5", "evaluation"):
            view.json(f"runs/large/{path}")
        for step in range(1, 40, 4):
            assert len(view.json(f"runs/large/step/{step}/rollouts")["rollouts"]) == 512
            view.json(f"runs/large/step/{step}/rollouts/3/2")
        assert len(view.json("runs/long/step/2/rollouts/0/0")[0]["tokens"]) == 32_000
        assert psutil.Process(view.pid).memory_info().rss < 300e6
