"""A launcher process that runs fake programs: `fake_launcher.py RUN_FOLDER MAX_STEPS INFER TRAIN ORCH [TEACHER]`, where
the last ones are the steps of each fake program, joined by spaces. It founds the run itself. With FAKE_GRACE_S, that is
how long programs may take to end; with FAKE_PORT, that is where the teacher answers."""

import os
import sys
from pathlib import Path

from deploy import supervise
from deploy.launcher import explain, locked, run_programs
from deploy.processes import Program
from deploy.progress import make_display
from transport.run import found_run

FAKE = Path(__file__).with_name("fake_program.py")


def main() -> None:
    path, max_steps = Path(sys.argv[1]), int(sys.argv[2])
    supervise.GRACE_S = float(os.environ.get("FAKE_GRACE_S", supervise.GRACE_S))
    with locked(path) as lock:
        folder = found_run(path)
        programs = [
            Program(
                role=role,
                command=(sys.executable, "-I", "-S", str(FAKE), *steps.split()),
                log=folder.logs / f"{role}.log",
                environment=dict(os.environ),
                address=("127.0.0.1", int(os.environ["FAKE_PORT"])) if role == "teacher" else None,
            )
            for role, steps in zip(("infer", "train", "orch", "teacher"), sys.argv[3:7], strict=False)
        ]
        display = make_display(path, max_steps=max_steps, address=("127.0.0.1", 9))
        outcome = run_programs(programs, lock=lock, display=display, folder=folder, max_steps=max_steps)
    explain(outcome)
    sys.exit(outcome.exit_code)


if __name__ == "__main__":
    main()
