"""Every page in a real browser: no error on its console, no request elsewhere, live, by mouse and by keys."""

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from grpo.transport.run_warnings import kept_warnings
from grpo.transport.traces import SCHEMA, make_table, trace_path, write_table

from tests.grpo.run_folder import found, grpo
from tests.grpo.view.made_run import HOSTILE, make_run, trace
from tests.grpo.view.served import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; install it with: apt-get install chromium"),
]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
WAIT_MS = 180_000
"""Long, since machines may be slow and busy."""


@dataclass
class Browser:
    """A page of the browser."""

    page: "Page"
    base: str

    def open(self, address: str, shows: str) -> None:
        """Opens a page by its address and waits for what it shows."""
        self.page.goto(f"{self.base}#/{address}")
        self.page.wait_for_selector(shows)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "one", steps=12)
    make_run(root / "hostile", steps=2, text=HOSTILE + "long " * 400_000)
    make_run(root / "long", steps=2, groups=1, tokens=32_000)
    return root


@pytest.fixture(scope="module")
def view(root: Path) -> Iterator[Served]:
    with served(root) as one:
        yield one


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT_MS)
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: object, view: Served) -> Iterator[Browser]:
    with opened(chromium, view) as one:
        yield one


@contextmanager
def faultless(chromium: object, base: str, **context: object) -> Iterator[Browser]:
    """A page on which nothing goes wrong and which asks for nothing from elsewhere."""
    wrong: list[str] = []
    with chromium.new_context(**context) as made:  # type: ignore[attr-defined]
        page = made.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith((base, "data:")) else wrong.append(asked.url))
        yield Browser(page, base)
        assert wrong == []


@contextmanager
def opened(chromium: object, view: Served, **context: object) -> Iterator[Browser]:
    with faultless(chromium, f"http://127.0.0.1:{view.port}/", **context) as one:
        one.page.goto(view.address)
        one.page.wait_for_selector("h1")
        yield one


PAGES = {
    "run/one": "p:has-text('my_env.py')",
    "run/one/timeline": ".gantt canvas",
    "run/one?find=entropy&smooth=0.9&log=1&from=2&to=9": "figure:has-text('policy/entropy') .u-over",
    "run/one/step/3": ".groups a",
    "run/one/step/3?worst=log-ratio&sort=-reward&end=stop": "table[aria-label='worst tokens'] ins",
    "run/one/step/3/rollout/0%2F1": ".tokens span",
    "run/one/step/3/rollout/0%2F1?beside=0%2F2": ".beside section:nth-child(2) .tokens span",
    "run/one/eval/12": "table.rollouts a",
    "run/one/prompt/reverse-text/1": "td.answer",
    "run/one/evaluation?kind=all": ".cases .pair",
    "run/one/proof": ".checks li",
    "run/one/games": ".ratings circle",
    "run/one/settings": "dt:has-text('max_steps')",
    "compare?runs=one,hostile": ".u-over",
    "run/hostile/step/1/rollout/0%2F0": ".message.assistant button",
}


def _order(page: "Page") -> list[str]:
    """What the page of a run shows, from above: its name, its state, its pages, its figures, notes and charts."""
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('h1, main .state, .tabs, main .numbers, main .notes, main .charts')]"
        ".map((one) => one.classList[0] ?? one.tagName)"
    )
    return list(dict.fromkeys(found))


IN_ORDER = ["H1", "state", "tabs", "numbers", "notes", "charts"]


@pytest.mark.parametrize("late", ["/api/runs/one", "/api/runs/one/curves"])
def test_the_head_of_a_run_is_above_its_charts_whichever_answer_comes_first(
    chromium: object, view: Served, late: str
) -> None:
    other = {"/api/runs/one": ".charts", "/api/runs/one/curves": "main .state"}[late]
    held: list[Route] = []
    with opened(chromium, view) as browser:
        browser.page.route(lambda address: urlsplit(address).path == late, lambda route: held.append(route))
        browser.open("run/one", other)
        assert held
        browser.page.unroute_all()  # which lets those go on that were held
        for shows in ("main .state", ".charts"):
            browser.page.wait_for_selector(shows)
        assert _order(browser.page) == IN_ORDER


AXE = """async () => (await axe.run()).violations.map(({ id, nodes }) => [id, ...nodes.map((one) => one.html)])"""


@pytest.mark.parametrize("width", [400, 1280])
def test_every_page_is_shown_and_accessible(chromium: object, view: Served, width: int) -> None:
    scheme = "dark" if width == 400 else "light"
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    with opened(chromium, view, viewport={"width": width, "height": 800}, color_scheme=scheme) as browser:
        for address, shows in PAGES.items():
            browser.open(address, shows)
            assert browser.page.evaluate("document.documentElement.scrollWidth") <= width, address
            browser.page.evaluate(axe)
            assert browser.page.evaluate(AXE) == [], address


def test_three_clicks_lead_from_a_spike_to_its_token(browser: Browser) -> None:
    browser.open("run/one", "figure:has-text('Importance ratio') .u-over")
    plot = browser.page.locator("figure:has-text('Importance ratio') .u-over")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    plot.click(position={"x": box["width"] * 6 / 11, "y": box["height"] / 2})
    browser.page.wait_for_url("**/step/7")
    browser.page.click("table.rollouts th button:has-text('log-ratio')")
    browser.page.click("table.rollouts a >> nth=0")
    browser.page.click("button:text-is('largest')")
    assert "token_high" in browser.page.inner_text(".figures")
    assert "20.08" in browser.page.inner_text(".figures")


def test_keys_go_on_back_and_elsewhere(browser: Browser) -> None:
    browser.open("run/one/step/3", ".groups a")
    browser.page.keyboard.press("j")
    browser.page.wait_for_selector("b:text-is('4')")
    browser.page.keyboard.press("k")
    browser.page.wait_for_url("**/step/3")
    browser.page.keyboard.press("g")
    browser.page.keyboard.type("9")
    browser.page.keyboard.press("Enter")
    browser.page.wait_for_selector("b:text-is('9')")
    browser.page.keyboard.press("/")
    browser.page.keyboard.type("1/2")
    browser.page.locator("table.rollouts tbody tr >> nth=1").wait_for(state="detached")


def test_any_metric_is_found_and_a_range_holds_for_all_charts(browser: Browser) -> None:
    page = browser.page
    browser.open("run/one", "figure:has-text('Importance ratio') .u-over")
    page.fill("#search", "canary BASE")
    page.wait_for_selector("figure:has-text('policy/canary_base_max_abs') .u-over")
    assert page.locator("figure").count() == 1
    page.fill("#search", "reward")
    page.wait_for_selector("figure:has-text('reward/mean') .u-over")
    box = page.locator("figure:has-text('reward/mean') .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=*to=*")
    ends = [float(page.input_value(f"input[aria-label='{one} step']")) for one in ("first", "last")]
    assert 1 < ends[0] < ends[1] < 12
    page.click("button:has-text('all steps')")
    page.wait_for_url(lambda address: "from" not in urlsplit(address).fragment)


def test_a_chart_and_the_page_are_saved_as_pictures(browser: Browser) -> None:
    browser.open("run/one", "figure:has-text('Importance ratio') .u-over")
    for button in ("figure:has-text('Importance ratio') button", "button:has-text('picture of the page')"):
        with browser.page.expect_download() as download:
            browser.page.click(button)
        assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
        assert download.value.suggested_filename.endswith(".png")


def test_a_step_is_opened_from_a_chart_by_keys(browser: Browser) -> None:
    browser.open("run/one", "figure:has-text('Importance ratio') .u-over")
    chart = browser.page.locator("figure:has-text('Importance ratio') [role=slider]")
    chart.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.page.keyboard.press(key)
    assert (chart.get_attribute("aria-valuetext") or "").startswith("step 3:")
    browser.page.keyboard.press("Enter")
    browser.page.wait_for_url("**/step/3")


def test_tab_reaches_the_charts_and_shows_where_it_is(browser: Browser) -> None:
    browser.open("run/one", ".charts .u-over")
    browser.page.evaluate("document.activeElement.blur()")
    seen: list[str] = []
    for _ in range(60):
        browser.page.keyboard.press("Tab")
        seen.append(
            browser.page.evaluate("document.activeElement.getAttribute('role') ?? document.activeElement.tagName")
        )
        if seen[-1] == "slider":
            break
    assert seen[-1] == "slider"
    assert "A" in seen
    width = "getComputedStyle(document.activeElement).outlineWidth"
    assert browser.page.evaluate(width) not in ("", "0px")


def test_rollouts_are_found_by_their_text_and_filtered(browser: Browser) -> None:
    page = browser.page
    browser.open("run/one/step/3", "table.rollouts .clip")
    assert "so be it" in page.inner_text("table.rollouts")
    page.fill("#search", "so be it 2")
    page.wait_for_selector("[role=status]:text-is('4 of 16')")
    page.fill("#search", "")
    page.wait_for_selector("[role=status]:text-is('16 of 16')")
    page.fill("input[aria-label='least reward']", "1")
    page.keyboard.press("Enter")
    page.wait_for_selector("table.rollouts tbody tr:nth-child(16)", state="detached")
    rewards = page.locator("table.rollouts td[data-label=reward]").all_inner_texts()
    assert rewards
    assert set(rewards) == {"1"}


def test_pages_of_thousands_of_rollouts_are_turned(chromium: object, tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=1, groups=100, size=20, tokens=4)
    with served(tmp_path) as view, opened(chromium, view) as browser:
        browser.open("run/run/step/1", "table.rollouts .clip")
        assert browser.page.locator("table.rollouts tbody tr").count() == 50
        assert browser.page.locator(".groups li").count() == 60
        browser.page.click("nav[aria-label='pages of rollouts'] button:has-text('next')")
        browser.page.wait_for_selector("text=page 2 of 40")
        browser.page.wait_for_selector("table.rollouts a:text-is('2/10')")


def test_a_conversation_of_a_hundred_turns_is_folded_and_has_a_map_and_its_tree(
    chromium: object, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=1)
    rows = trace(1, 1, 1, 40, "x").to_pylist()
    talk = [{"role": "user", "content": "Find it."}]
    for turn in range(100):
        answer = {"role": "assistant", "content": f"turn {turn}"}
        talk += [answer | ({"error": "no such file"} if turn == 50 else {}), {"role": "tool", "content": "line\n" * 40}]
    rows[0]["messages"] = json.dumps(talk)
    write_table(make_table([rows[0], rows[0] | {"rollout": "0/0.0", "role": "helper"}], SCHEMA), trace_path(run, 1))
    with served(tmp_path) as view, opened(chromium, view) as browser:
        page = browser.page
        browser.open("run/run/step/1/rollout/0%2F0", ".map button")
        assert page.locator("article >> nth=0 >> .map button").count() == 201
        assert page.locator("article >> nth=0 >> .message details:not([open])").count() == 100
        assert page.locator(".tree li").count() == 2
        page.locator(".map .wrong >> nth=0").evaluate("(one) => one.click()")
        sync_api = pytest.importorskip("playwright.sync_api")
        sync_api.expect(page.locator(".message.wrong >> nth=0")).to_be_in_viewport(timeout=WAIT_MS)
        page.click("button:has-text('unfold all') >> nth=0")
        page.wait_for_selector("article >> nth=0 >> .message details[open] >> nth=99", state="attached")


def test_what_keeps_a_run_from_learning_is_at_its_head(chromium: object, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    lines = [{"progress/step": step, "reward/mean": 0.0, "reward/groups_without_spread": 1.0} for step in range(1, 13)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(tmp_path) as view, opened(chromium, view) as browser:
        browser.open("run/run", ".note.finding:has-text('nothing can be learned')")
        browser.page.click(".note.finding a:has-text('answers of step 12')")
        browser.page.wait_for_url("**/step/12")


@pytest.mark.parametrize("moment", ["h1", "#runs option"])
def test_an_address_counts_from_the_moment_that_the_first_page_is_there(
    chromium: object, tmp_path: Path, moment: str
) -> None:
    make_run(tmp_path / "run", steps=1)
    with served(tmp_path) as view, faultless(chromium, f"http://127.0.0.1:{view.port}/") as browser:
        browser.page.add_init_script(f"""new MutationObserver((_, observer) => {{
          if (!document.querySelector("{moment}")) return;
          observer.disconnect();
          location.hash = "#/run/run/step/1";
        }}).observe(document, {{ childList: true, subtree: true }})""")
        browser.page.goto(view.address)
        browser.page.wait_for_selector("table.rollouts .clip")


def test_a_key_counts_from_the_moment_that_its_page_is_there(browser: Browser) -> None:
    browser.open("run/one/step/3", ".groups a")
    browser.page.evaluate("""() => new MutationObserver((_, observer) => {
      if (document.querySelector("main b")?.textContent !== "4") return;
      observer.disconnect();
      document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "k", bubbles: true }));
    }).observe(document.body, { childList: true, subtree: true, characterData: true })""")
    browser.page.keyboard.press("j")
    browser.page.wait_for_url("**/step/4")
    browser.page.wait_for_url("**/step/3")


def test_hostile_text_is_shown_as_text(browser: Browser) -> None:
    browser.open("run/hostile/step/1/rollout/0%2F0", ".message.assistant")
    assert "<script>alert(1)</script>" in browser.page.inner_text(".message.assistant pre")
    assert "\\u202e" in browser.page.inner_text(".message.assistant pre")
    assert browser.page.locator(".message img").count() == 0


def test_a_run_that_has_only_begun_has_every_page(chromium: object, tmp_path: Path) -> None:
    found(tmp_path / "run")
    with served(tmp_path) as view, opened(chromium, view) as browser:
        for page in ("", "/timeline", "/step/1", "/evaluation", "/proof", "/settings", "/prompt/reverse-text/1"):
            browser.open(f"run/run{page}", "h1")
            browser.page.wait_for_load_state("networkidle")


def test_a_living_run_is_followed(chromium: object, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with served(run) as view, opened(chromium, view) as browser:
        browser.open("run/run", ".u-over")
        write_table(trace(4, 2, 2, 10, "new"), trace_path(run, 4))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"progress/step": 4.0, "reward/mean": 0.987}) + "\n")
            os.fsync(file.fileno())
        browser.page.wait_for_selector("[data-value]:text-is('0.9870')")
        with kept_warnings(run, "orch", step=lambda: 4):
            logging.getLogger("grpo.orchestrator").warning("all rewards are equal")
        browser.page.wait_for_selector("main .warning:has-text('all rewards are equal')")


def test_live_means_that_the_run_is_alive(chromium: object, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)

    def say(state: str) -> None:
        (run / "status").mkdir(exist_ok=True)
        for role in ("orch", "train"):
            said = {"state": state, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            (run / "status" / f"{role}.json").write_text(json.dumps(said))

    say("training")
    with served(run) as view, opened(chromium, view) as browser:
        browser.open("run/run", "main .state.live")
        say("finished")
        (run / "summary.json").write_text("{}")
        browser.page.wait_for_selector("main .state.finished:not(.live)")


def test_a_long_rollout_is_shown_to_its_end(browser: Browser) -> None:
    """How soon its beginning is there: benchmarks.view."""
    browser.open("run/long/step/2/rollout/0%2F1", ".tokens span")
    browser.page.wait_for_selector("[data-at='31999']")


def test_a_report_needs_no_server(chromium: object, root: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert grpo("view", root / "one", "--export", report).returncode == 0
    with faultless(chromium, report.as_uri()) as browser:
        browser.open("run/one", ".u-over")
        assert _order(browser.page) == IN_ORDER
        browser.open("run/one/step/12", ".groups a")
        browser.open("run/one/proof", ".checks li")
        browser.open("run/one/step/12?worst=log-ratio", "table[aria-label='worst tokens'] ins")
        assert "so be it" in browser.page.inner_text("table.rollouts")
        browser.open("run/one/evaluation?kind=all", ".cases .clip:has-text('cat')")
