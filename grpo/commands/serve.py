"""`grpo serve RUN`: the run's server with its base and one policy version, over the OpenAI API, without a trainer."""

import argparse
from pathlib import Path

from grpo.deploy.programs import Signals
from grpo.policy_version import open_version
from grpo.server_process import ALIAS, server_process, server_settings
from grpo.transport.ports import port_number

EPILOG = f"""\
The server is grpo-infer with the run's settings: the version is served once its canary agrees with the trainer's
numbers. `model: {ALIAS}` is the version, the run's model name its base. Without the environment variable VLLM_API_KEY
(infer.api_key_var) no key is asked for.

  grpo serve outputs/quickstart --port 8000
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{ALIAS}", "messages": [{{"role": "user", "content": "reverse"}}]}}'

exit codes: 0 done, 1 the version cannot be served, 2 there is no run, or the command line is wrong, 130 Ctrl-C,
143 SIGTERM"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    parser.add_argument("--step", type=int, metavar="N", help="the version of this step (default: the newest)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=port_number, help="default: a free one")


def main(options: argparse.Namespace) -> int:
    """Returns the exit code, once the server has ended."""
    version = open_version(options.run, options.step)
    settings = server_settings(version, host=options.host, port=options.port)
    with Signals(), server_process(settings, version.run / "logs" / "serve.log", version=version) as server:
        print(f"{server.url}/v1  model: {ALIAS} (version {version.manifest.version}) or {server.base}", flush=True)
        return server.process.wait()
