"""The program behind the page: reads files, answers on loopback to whoever has the address's token, and writes
nothing."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from grpo.transport.errors import UserError
from grpo.view import data, traces

HOST = "127.0.0.1"
COOKIE = "grpo-view"
POLL_S = 0.5
"""Seconds between two looks at the files of the runs, once for all pages."""
MAX_LIVE = 256
"""Pages that may listen for changes at once."""
STATIC: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "common.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "curves.js": "text/javascript; charset=utf-8",
    "conversation.js": "text/javascript; charset=utf-8",
    "evaluation.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
    "steps.js": "text/javascript; charset=utf-8",
    "rollouts.js": "text/javascript; charset=utf-8",
    "games.js": "text/javascript; charset=utf-8",
    "proof.js": "text/javascript; charset=utf-8",
    "vendor/preact-htm.js": "text/javascript; charset=utf-8",
    "vendor/uplot.js": "text/javascript; charset=utf-8",
    "vendor/uplot.css": "text/css; charset=utf-8",
}
"""All files that are served, and what they are."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Next = Callable[[Request], Awaitable[Response]]


def make_app(folders: Mapping[str, Path] | Callable[[], Mapping[str, Path]], token: str, port: int) -> FastAPI:
    """Returns the application for these runs, by name; `folders` may be asked anew each time. `port` is the one that
    requests have to name in `Host`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    runs = folders if callable(folders) else lambda: folders
    app.include_router(_answers(runs), prefix="/api")
    watch = _Watch(runs)

    @app.get("/api/events")
    async def events() -> StreamingResponse:
        """Server-sent events: the name of each run that has changed."""
        if watch.listeners >= MAX_LIVE:
            raise HTTPException(503, f"{MAX_LIVE} pages listen already")
        return StreamingResponse(watch.changes(), media_type="text/event-stream")

    app.include_router(_pages())

    @app.middleware("http")
    async def guard(request: Request, answer: Next) -> Response:
        response = refusal(request, token, port) or await answer(request)
        response.headers.update(_HEADERS)
        return response

    return app


def refusal(request: Request, token: str, port: int) -> Response | None:
    """Why a request is not answered: it names another host (DNS rebinding), comes from another page, or lacks the
    token. The token in an address becomes a cookie that no script can read, and leaves the address."""
    hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
    origin = request.headers.get("origin")
    if request.headers.get("host") not in hosts or (origin is not None and urlsplit(origin).netloc not in hosts):
        return Response("this page is served to its own address only", 403)
    if (given := request.query_params.get("token")) is not None and _same(given, token):
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(f"{COOKIE}-{port}", token, httponly=True, samesite="strict")
        return response
    if not _same(request.cookies.get(f"{COOKIE}-{port}", ""), token):
        return Response("open the address that `grpo view` has printed: it has the token in it", 401)
    return None


def _same(given: str, token: str) -> bool:
    """Compares digests, which are of equal length, so that the time tells nothing."""
    return secrets.compare_digest(hashlib.sha256(given.encode()).digest(), hashlib.sha256(token.encode()).digest())


def _pages() -> APIRouter:
    router = APIRouter()

    @router.get("/")
    @router.get("/{name:path}")
    def page(name: str = "") -> Response:
        """Returns one of the page's own files; there are no others."""
        name = name.removeprefix("static/") or "index.html"
        if name not in STATIC:
            raise HTTPException(404, "no such page")
        return Response(static(name), media_type=STATIC[name])

    return router


def static(name: str) -> bytes:
    """Returns one of the files in `STATIC`."""
    return files("grpo.view").joinpath("static", *name.split("/")).read_bytes()


def _answers(runs: Callable[[], Mapping[str, Path]]) -> APIRouter:
    router = APIRouter()

    def run(name: str) -> Path:
        try:
            return runs()[name]
        except KeyError:
            raise HTTPException(404, f"no run {name!r}; there are {', '.join(runs()) or 'none'}") from None

    @router.get("/runs")
    def overview() -> Response:
        return as_json([data.overview(name, path) for name, path in runs().items()])

    @router.get("/runs/{name}")
    def one(name: str) -> Response:
        return as_json(data.overview(name, run(name)))

    @router.get("/runs/{name}/curves")
    def curves(name: str, low: float | None = None, high: float | None = None) -> Response:
        return as_json(data.curves(run(name), low, high))

    @router.get("/runs/{name}/settings")
    def settings(name: str) -> Response:
        return _answer(lambda: data.settings(run(name)))

    @router.get("/runs/{name}/timeline")
    def timeline(name: str, start_s: float | None = None, end_s: float | None = None) -> Response:
        return _answer(lambda: data.timeline(run(name), start_s, end_s))

    @router.get("/runs/{name}/{kind}/{number}/rollouts")
    def step(name: str, kind: str, number: int) -> Response:
        return _answer(lambda: data.step(run(name), number, evaluation=kind == "eval"))

    @router.get("/runs/{name}/{kind}/{number}/rollouts/{rollout:path}")
    def rollout(name: str, kind: str, number: int, rollout: str) -> Response:
        return _answer(lambda: data.rollout(run(name), number, rollout, evaluation=kind == "eval"))

    @router.get("/runs/{name}/{kind}/{number}/texts")
    def texts(name: str, kind: str, number: int, rollouts: str = "", tokens: bool = False) -> Response:
        ids = set(rollouts.split(",")) if rollouts else None
        return _answer(lambda: traces.texts_of(run(name), number, ids, evaluation=kind == "eval", tokens=tokens))

    @router.get("/runs/{name}/{kind}/{number}/find")
    def find(name: str, kind: str, number: int, text: str) -> Response:
        return _answer(lambda: traces.rollouts_with(run(name), number, text, evaluation=kind == "eval"))

    @router.get("/runs/{name}/{kind}/{number}/tokens")
    def tokens(name: str, kind: str, number: int, by: str = traces.MEASURES[0]) -> Response:
        return _answer(lambda: traces.worst_tokens(run(name), number, by, evaluation=kind == "eval"))

    @router.get("/runs/{name}/prompt")
    def prompt(name: str, env: str, example: int) -> Response:
        return _answer(lambda: data.prompt(run(name), env, example))

    @router.get("/runs/{name}/evaluation")
    def evaluation(name: str, before: int | None = None, after: int | None = None) -> Response:
        return _answer(lambda: data.evaluation(run(name), before, after))

    @router.get("/runs/{name}/games")
    def games(name: str) -> Response:
        return _answer(lambda: data.games(run(name)))

    @router.get("/runs/{name}/proof")
    def proof(name: str) -> Response:
        return _answer(lambda: data.proof(run(name)))

    return router


def _answer(answer: Callable[[], Any]) -> Response:
    """Returns the answer from the run's files, or the reason why they cannot be read."""
    try:
        return as_json(answer())
    except (UserError, OSError, OverflowError) as error:  # numbers that no database holds
        raise HTTPException(404, str(error)) from error


def as_json(answer: Any) -> Response:
    """An answer to the page's scripts."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


class _Watch:
    """Tells every listening page which runs have changed; looks at the files once for all."""

    def __init__(self, runs: Callable[[], Mapping[str, Path]]) -> None:
        self._runs = runs
        self._seen: dict[str, object] = {}
        self._looked_s = 0.0
        self.listeners = 0

    async def changes(self) -> AsyncIterator[str]:
        """Events until the page goes away; a comment now and then finds out whether it has."""
        known, quiet_s = dict(self._look()), 0.0
        self.listeners += 1
        try:
            while True:
                await asyncio.sleep(POLL_S)
                quiet_s += POLL_S
                for name, state in self._look().items():
                    if known.get(name) != state:
                        known[name], quiet_s = state, 0.0
                        yield f"data: {msgspec.json.encode(name).decode()}\n\n"
                if quiet_s >= 10.0:
                    quiet_s = 0.0
                    yield ": still here\n\n"
        finally:
            self.listeners -= 1

    def _look(self) -> Mapping[str, object]:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s >= POLL_S / 2 or not self._seen:
            self._seen = {name: data.fingerprint(path) for name, path in self._runs().items()}
            self._looked_s = now_s
        return self._seen
