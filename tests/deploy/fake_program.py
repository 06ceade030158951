"""Stands for grpo-infer, grpo-train or grpo-orch in tests of the launcher: does what its arguments say, in order.

grandchild[:setsid]  start a process that sleeps, in a session of its own if asked
pids:FILE            append the process ids of this process and of the grandchildren to FILE
variable:NAME        print the value of an environment variable
print:TEXT  sleep:SECONDS  wait:FILE (until it exists)  touch:FILE
semaphore:FILE       have a semaphore, as a process that was spawned by multiprocessing has, and append its name to FILE
listen:PORT          answer on this port of 127.0.0.1 from now on
accept               wait until somebody looks whether it answers there
status:FILE:STATE[:STEP]  say in this status file what this process does, in which step
deaf                 ignore SIGINT and SIGTERM from now on
exit:CODE  kill:SIGNAL (oneself)
--ANYTHING           nothing
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SLEEPER = [sys.executable, "-I", "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    grandchildren: list[int] = []
    held: list[Any] = []
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    for step in sys.argv[1:]:
        name, _, value = step.partition(":")
        if name == "grandchild":
            grandchildren.append(subprocess.Popen(SLEEPER, start_new_session=value == "setsid").pid)
        elif name == "pids":
            with Path(value).open("a") as file:
                file.write("".join(f"{pid}\n" for pid in [os.getpid(), *grandchildren]))
        elif name == "listen":
            held.append(socket.create_server(("127.0.0.1", int(value))))
        elif name == "accept":
            held[-1].accept()
        elif name == "status":
            file, state, *step = value.split(":")
            fields = {"state": state, "step": int(step[0]) if step else None, "pid": os.getpid()}
            fields |= {"host": socket.gethostname(), "since": time.time()}
            Path(f"{file}.new").write_text(json.dumps(fields))
            Path(f"{file}.new").rename(file)
        elif name == "semaphore":
            held.append(semaphore := multiprocessing.get_context("spawn").Semaphore())
            with Path(value).open("a") as file:
                file.write(f"{semaphore._semlock.name}\n")
        elif name == "print":
            print(value, flush=True)
        elif name == "variable":
            print(os.environ.get(value), flush=True)
        elif name == "sleep":
            time.sleep(float(value))
        elif name == "wait":
            while not Path(value).exists():
                time.sleep(0.02)
        elif name == "touch":
            Path(value).touch()
        elif name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif name == "exit":
            sys.exit(int(value))
        elif name == "kill":
            os.kill(os.getpid(), signal.Signals[value])
        elif not name.startswith("--"):
            raise SystemExit(f"fake program: unknown step {step!r}")


if __name__ == "__main__":
    main()
