"""`grpo view --export`: the main pages of runs in one HTML file that needs no program and no network."""

import base64
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from grpo.transport.errors import UserError
from grpo.transport.traces import traced_steps
from grpo.view import data, traces
from grpo.view.server import STATIC, static

NUM_STEPS = 3
"""Number of the last steps whose table of rollouts is in a report."""
NUM_ROLLOUTS = 24
"""Number of rollouts of each of these steps, those with the largest log-ratio, whose tokens are in it."""


def export(runs: Mapping[str, Path]) -> str:
    """Returns the page with the answers that its scripts would ask for."""
    answers: dict[str, Any] = {"runs": [data.overview(name, run) for name, run in runs.items()]}
    for name, run in runs.items():
        answers |= _answers(f"runs/{quote(name)}", name, run)
    return _page(msgspec.json.encode(answers).decode())


def _answers(start: str, name: str, run: Path) -> dict[str, Any]:
    steps = traced_steps(run)[-NUM_STEPS:]
    answers: dict[str, Any] = {start: data.overview(name, run) | {"traced": steps}, f"{start}/curves": data.curves(run)}
    asked: dict[str, Callable[[], Any]] = {
        "settings": lambda: data.settings(run),
        "timeline": lambda: data.timeline(run, None, None),
        "evaluation": lambda: data.evaluation(run, None, None),
        "games": lambda: data.games(run),
        "proof": lambda: data.proof(run),
    }
    for what, answer in asked.items():
        try:
            answers[f"{start}/{what}"] = answer()
        except (UserError, OSError):
            continue
    for step in steps:
        rows = traces.rollouts_of(run, step)
        answers[f"{start}/step/{step}/rollouts"] = {"rollouts": rows, "traced": steps}
        answers[f"{start}/step/{step}/texts"] = traces.texts_of(run, step, None)
        for by in traces.MEASURES:
            answers[f"{start}/step/{step}/tokens?by={by}"] = traces.worst_tokens(run, step, by)
        rows.sort(key=lambda row: -abs(row.get("max_log_ratio") or 0.0))
        for rollout in list(dict.fromkeys(row["rollout"] for row in rows))[:NUM_ROLLOUTS]:
            answers[f"{start}/step/{step}/rollouts/{rollout}"] = data.rollout(run, step, rollout, evaluation=False)
    for version in answers.get(f"{start}/evaluation", {}).get("compared", ()):
        evaluated = traces.texts_of(run, version, None, evaluation=True, tokens=True)
        answers[f"{start}/eval/{version}/texts"] = evaluated
    return answers


def _page(answers: str) -> str:
    """The page's files put into one. Scripts import each other by names that a map leads to their text."""
    scripts = {name: static(name).decode() for name in STATIC if name.endswith(".js") and name != "vendor/uplot.js"}
    imports = {f"grpo/{name}": _as_address(_absolute(text)) for name, text in scripts.items()}
    styles = "".join(static(name).decode() for name in STATIC if name.endswith(".css"))
    head = (
        f"<style>{styles}</style>"
        f'<script type="application/json" id="answers">{_harmless(answers)}</script>'
        f"<script>{static('vendor/uplot.js').decode()}</script>"
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
        '<script type="module">import "grpo/app.js";</script>'
    )
    page = re.sub(r"<(link rel=\"stylesheet\"[^>]*|script [^>]*></script)>\n", "", static("index.html").decode())
    return page.replace("</head>", f"{head}\n</head>")


def _absolute(script: str) -> str:
    return re.sub(r'"\./([\w/-]+\.js)"', r'"grpo/\1"', script)


def _as_address(script: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(script.encode()).decode()


def _harmless(text: str) -> str:
    """JSON in which no text of a rollout can end the element that holds it."""
    return text.replace("<", "\\u003c")
