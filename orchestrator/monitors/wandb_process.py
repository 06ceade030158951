"""The process that talks to Weights & Biases: what it is told on standard input, one JSON object a line.

It is apart so that nothing that library does, waits for or fails at is felt by the run. The first line says how to
begin, the others what to log; what it answers, also one JSON object a line, are the beginning and every failure. It
ends when it is told to, or when its standard input ends because the orchestrator is gone.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

LONGEST_END_S = 600.0
"""Seconds after the last line in which uploads may end. What is not uploaded then is in the run's folder."""
STEP = "progress/step"

Tell = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Reads until the end."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what the library prints is no answer

    def tell(answer: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # where the orchestrator is gone, what it has said is logged still
            os.write(answers, json.dumps(answer).encode() + b"\n")

    work((json.loads(line) for line in sys.stdin), tell)


def work(lines: Iterator[Any], tell: Tell) -> None:
    """Logs what `lines` say, from the first to the last."""
    begin = next(lines, None)
    if begin is None:
        return
    try:
        run = _begin(begin["begin"])
        tell({"began": run.dir if begin["begin"]["offline"] else run.url})
    except Exception as error:
        tell(_failed(error))
        return
    exit_code = 1
    for line in lines:
        if "end" in line:
            exit_code = line["end"]
            break
        try:
            _log(run, line)
            tell({"logged": 1})
        except Exception as error:
            tell(_failed(error))
    end = threading.Timer(LONGEST_END_S, os._exit, (1,))
    end.daemon = True
    end.start()
    try:
        run.finish(exit_code=exit_code)
    except Exception as error:
        tell(_failed(error))


def _failed(error: Exception) -> dict[str, str]:
    return {"failed": f"{type(error).__name__}: {error}"}


def _begin(begin: Mapping[str, Any]) -> Any:
    import wandb

    run = wandb.init(
        project=begin["project"],
        name=begin["name"],
        id=begin["run_id"],
        resume="allow",
        dir=begin["folder"],
        mode="offline" if begin["offline"] else "online",
        config=begin["config"],
        settings=wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            save_code=False,
            disable_git=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        ),
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def _log(run: Any, line: Mapping[str, Any]) -> None:
    import wandb

    logged: dict[str, Any] = dict(line.get("metrics", {}))
    for key, table in line.get("tables", {}).items():
        logged[key] = wandb.Table(columns=table["columns"], data=table["rows"])
    for key, values in line.get("histograms", {}).items():
        logged[key] = wandb.Histogram(values)
    if logged:
        run.log(logged)
    run.summary.update(line.get("summary", {}))


def send(to: IO[str], line: Mapping[str, Any]) -> None:
    """Writes one line that this process reads. Raises what cannot be written."""
    to.write(json.dumps(line) + "\n")
    to.flush()


if __name__ == "__main__":
    main()
