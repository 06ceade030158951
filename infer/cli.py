"""`grpo-infer [infer.yaml] [--key value …]`: the inference server."""

import logging
import multiprocessing
import os

from configs.common import load_settings
from configs.infer import InferSettings
from transport import imports

if multiprocessing.parent_process() is not None:
    imports.begin()  # the engine's process, which imports this module before vLLM; `PolicyWorker` ends it


def main() -> None:
    """Exit codes: 0 done, 1 failure, 2 bad settings, 130 on SIGINT, 143 on SIGTERM."""
    settings = load_settings(InferSettings)
    imports.begin()

    from infer.server import run

    code = run(settings)
    logging.shutdown()
    # At once: vLLM's libraries report leaks while the interpreter ends, below the line that says what went wrong.
    os._exit(code)


if __name__ == "__main__":
    main()
