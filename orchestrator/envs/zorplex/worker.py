"""A tool worker of `zorplex`: `python -m orchestrator.envs.zorplex.worker SEED MAX_VALUE FD PARENT`.

Reads requests, one JSON object a line, and answers each with a line that has its `id`: `{"id": 7, "word": "apple"}`
with the word's value, `{"id": 8}`, a ping, with nothing else. What it cannot parse it ignores. It ends with its
socket, and the kernel kills it when the process that started it dies.
"""

import json
import socket
import sys
from typing import Any

from orchestrator.envs.zorplex import task
from transport.parent import end_with


def answered(line: bytes, seed: int, max_value: int) -> dict[str, Any] | None:
    """The answer to a request; None where the line is none."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or not isinstance(request.get("id"), int):
        return None
    if "word" not in request:
        return {"id": request["id"]}
    word = str(request["word"]).strip().lower()
    value = task.zorplex(word, seed, max_value) if word in task.WORDS else None
    return {"id": request["id"], "value": value}


def main() -> None:
    """Serves one pool until it is gone."""
    seed, max_value, fd, parent = (int(argument) for argument in sys.argv[1:5])
    end_with(parent)
    with socket.socket(fileno=fd) as connection, connection.makefile("rb") as requests:
        for line in requests:
            if (answer := answered(line, seed, max_value)) is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
