"""`grpo-train [train.yaml] [--key value ...]`"""

import logging
import os
import signal
import sys
from types import FrameType

from configs.common import load_settings
from configs.train import TrainSettings


def main() -> None:
    """Exit status: 0 done, 1 the run failed, 2 bad settings, 130 after SIGINT, 143 after SIGTERM."""
    settings = load_settings(TrainSettings)
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from trainer.errors import TrainerError
    from transport.errors import TransportError
    from transport.weights.identity import resolve_model

    try:
        model_folder = resolve_model(settings.model)  # before torch is imported, which takes seconds
        from trainer.loop import run

        run(settings, model_folder)
    except (TrainerError, TransportError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        logging.getLogger("trainer").exception("unexpected failure")
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _end(number: int, _: FrameType | None) -> None:
    """Ends the process at the next Python instruction: nothing that is published is ever half written."""
    os.write(2, f"ended by {signal.Signals(number).name}\n".encode())  # print may be what was interrupted
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
