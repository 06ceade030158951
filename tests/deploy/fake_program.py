"""Stands for grpo-infer, grpo-train or grpo-orch in tests of the launcher: does what its arguments say, in order.

grandchild[:setsid]  start a process that sleeps, in a session of its own if asked
pids:FILE            append the process ids of this process and of the grandchildren to FILE
print:TEXT  sleep:SECONDS  wait:FILE (until it exists)
semaphore:FILE       have a semaphore, as a process that was spawned by multiprocessing has, and append its name to FILE
deaf                 ignore SIGINT and SIGTERM from now on
first:STEP           do that step unless the file `first` beside this process's log is there, which it makes
usr1:CODE            end with that code after SIGUSR1
exit:CODE  kill:SIGNAL (oneself)
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo.transport.parent import end_with_starter

SLEEPER = [sys.executable, "-I", "-S", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    grandchildren: list[int] = []
    held: list[Any] = []
    end_with_starter()
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    for step in sys.argv[1:]:
        name, _, value = step.partition(":")
        if name == "first":
            log = Path("/proc/self/fd/1").readlink()
            if (mark := log.with_suffix(".first")).exists():
                continue
            mark.touch()
            name, _, value = value.partition(":")
        if name == "grandchild":
            grandchildren.append(subprocess.Popen(SLEEPER, start_new_session=value == "setsid").pid)
        elif name == "pids":
            with Path(value).open("a") as file:
                file.write("".join(f"{pid}\n" for pid in [os.getpid(), *grandchildren]))
        elif name == "semaphore":
            held.append(semaphore := multiprocessing.get_context("spawn").Semaphore())
            with Path(value).open("a") as file:
                file.write(f"{semaphore._semlock.name}\n")
        elif name == "print":
            print(value.replace("_", " "), flush=True)
        elif name == "sleep":
            time.sleep(float(value))
        elif name == "wait":
            while not Path(value).exists():
                time.sleep(0.02)
        elif name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        elif name == "usr1":
            signal.signal(signal.SIGUSR1, lambda *_, code=int(value): sys.exit(code))
        elif name == "exit":
            sys.exit(int(value))
        elif name == "kill":
            os.kill(os.getpid(), signal.Signals[value])
        else:
            raise SystemExit(f"fake program: unknown step {step!r}")


if __name__ == "__main__":
    main()
