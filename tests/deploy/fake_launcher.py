"""A launcher process that runs fake programs: `fake_launcher.py RUN_FOLDER MAX_STEPS INFER TRAIN ORCH [TEACHER]`, where
the last ones are the steps of each fake program, joined by spaces. It founds the run itself. Variables: FAKE_GRACE_S,
how long programs may take to end; FAKE_PAUSE_S before the first start again; FAKE_RESTARTS, how often there is one;
FAKE_PORT and FAKE_INFER_PORT, where teacher and server answer."""

import os
import sys
from pathlib import Path

from deploy import kept, supervise
from deploy.launcher import explain, locked, run_programs
from deploy.processes import Program
from deploy.restarts import again_of
from grpo.status import shown
from transport.run import found_run

FAKE = Path(__file__).with_name("fake_program.py")


def main() -> None:
    path, max_steps = Path(sys.argv[1]), int(sys.argv[2])
    supervise.GRACE_S = float(os.environ.get("FAKE_GRACE_S", supervise.GRACE_S))
    kept.FIRST_PAUSE_S = float(os.environ.get("FAKE_PAUSE_S", kept.FIRST_PAUSE_S))
    kept.LOOK_S = 0.0
    ports = {"infer": os.environ.get("FAKE_INFER_PORT"), "teacher": os.environ.get("FAKE_PORT")}
    with locked(path) as lock:
        folder = found_run(path)
        programs = [
            Program(
                role=role,
                command=(sys.executable, "-I", "-S", str(FAKE), *steps.split()),
                log=folder.logs / f"{role}.log",
                environment=dict(os.environ),
                address=("127.0.0.1", int(port)) if (port := ports.get(role)) is not None else None,
                silent=role == "teacher",
                again=again_of(role, limit=int(os.environ.get("FAKE_RESTARTS", 3))),
            )
            for role, steps in zip(("infer", "train", "orch", "teacher"), sys.argv[3:7], strict=False)
        ]
        outcome = run_programs(programs, lock=lock, show=shown, folder=folder, max_steps=max_steps)
    explain(outcome)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
