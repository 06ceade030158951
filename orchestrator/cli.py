"""`grpo-orch [orch.yaml] [--key value …]`: the orchestrator."""

import signal
import sys
from types import FrameType

from configs.entry import load_settings
from configs.orch import OrchSettings
from transport.parent import end_with_starter


def main() -> None:
    """Exit codes: 0 done, 1 failure, 2 bad settings, 75 the trainer is gone, and this may be started again, 130 on
    SIGINT, 143 on SIGTERM."""
    end_with_starter()
    settings = load_settings(OrchSettings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)

    from orchestrator.loop import run

    raise SystemExit(run(settings))


def _end(number: int, _: FrameType | None) -> None:
    """Until the loops take over, there is nothing to put in order."""
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
