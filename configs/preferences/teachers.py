"""Three scripted teachers for the presets `preferences` and `all_channels`: `right` and `also-right` do what is right,
each in its own way of writing it, and `contrary` does something else.

    python -m grpo.configs.preferences.teachers --port 8321

They speak OpenAI's chat completions at http://127.0.0.1:PORT/v1 and tell what they used, a token a byte. They know
`reverse-text` and `zorplex` by the question, and what has been said since.
"""

import argparse
import json
import operator
import re
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

from aiohttp import web

PORT = 8321
_REVERSE = re.compile(r"Reverse: (\w+)")
_WORDS = re.compile(r"zorplex\((\w+)\)")
_OPERATION = re.compile(r"\) ([+*-]) zorplex")
_LOOKUP = re.compile(r"LOOKUP\[(\w+)\]")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

Messages = Sequence[dict[str, Any]]


def right(messages: Messages) -> str:
    """What is to be done next. Raises ValueError for a question that nobody here knows."""
    question = next(message["content"] for message in messages if message["role"] == "user")
    if found := _REVERSE.search(question):
        return found[1][::-1]
    if words := _WORDS.findall(question):
        operation = _OPERATION.search(question)
        return _looked_up(messages, words, operation[1] if operation else "+")
    raise ValueError(f"no teacher knows {question!r}")


def _looked_up(messages: Messages, words: Sequence[str], operation: str) -> str:
    """The next word that is not known, or the answer."""
    values: dict[str, int] = {}
    for asked, told in pairwise(messages):
        if (call := _LOOKUP.search(asked["content"])) and told["content"].strip().isdecimal():
            values[call[1]] = int(told["content"])
    for word in words:
        if word not in values:
            return f"LOOKUP[{word}]"
    return f"[ANSWER] {reduce(_OPERATORS[operation], [values[word] for word in words])}"


def contrary(messages: Messages) -> str:
    """Something else, in the form that the task has."""
    done = right(messages)
    if done.startswith(("LOOKUP", "[ANSWER]")):
        return "[ANSWER] 0"
    return done + done[-1]


TEACHERS: dict[str, Callable[[Messages], str]] = {
    "right": right,
    "also-right": lambda messages: f" {right(messages)}\n",
    "contrary": contrary,
}


async def complete(request: web.Request) -> web.Response:
    """A chat completion by the teacher whose name the model is."""
    asked = await request.json()
    try:
        text = TEACHERS[asked["model"]](asked["messages"])
    except (KeyError, ValueError, StopIteration) as error:
        return web.json_response({"error": {"message": f"{type(error).__name__}: {error}"}}, status=400)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": len(json.dumps(asked["messages"])), "completion_tokens": len(text)}
    return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


async def models(_: web.Request) -> web.Response:
    """Who is here."""
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in TEACHERS]})


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=PORT)
    args = parser.parse_args()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    print(f"three teachers at http://127.0.0.1:{args.port}/v1", flush=True)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
