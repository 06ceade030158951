"""Types every command of docs/first_run.md with a tiny random model of each family, then some more (a higher
`--max_steps`, a server, an adapter that is exported and gone on from, a supervised stage), and prints how each ends.

    python -m benchmarks.first_hour [FAMILY ...]

A family takes some two minutes of two idle cores. The models have the layers, tokenizer and chat template of their
family under the name that the page gives (`tools/random_models.py`, `FAMILIES`).
"""

import argparse
import tempfile
from pathlib import Path

from tests.e2e.first_hour import Desk, lines
from tools.random_models import FAMILIES

PAIRS = "".join(f'{{"prompt": "What is {n} + 2?", "answer": "{n + 2}"}}\n' for n in range(8))
MORE = (
    "grpo qwen3_4b_gsm8k --output_dir outputs/first --max_steps 2",
    "grpo serve outputs/first",
    "grpo export outputs/first --output first-adapter",
    "grpo qwen3_4b_gsm8k --output_dir outputs/second --max_steps 100 --train.init_adapter first-adapter",
    "grpo sft pairs.jsonl --model Qwen/Qwen3-4B --output_dir outputs/sft",
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these")
    families = parser.parse_args().families or [*FAMILIES]
    if unknown := [family for family in families if family not in FAMILIES]:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            desk = Desk(Path(folder), family)
            (desk.folder / "pairs.jsonl").write_text(PAIRS)
            for line in (*lines(), *MORE):
                typed = desk.type(line, said="How many eggs are 2 + 3?\n")
                print(
                    f"{family:8} exit {typed.code:3} {typed.took_s:6.1f} s, {typed.cpu_s:5.1f} of cores  {typed.line}",
                    flush=True,
                )
                if typed.code:
                    print("    " + "\n    ".join(typed.said.splitlines()[-12:]), flush=True)


if __name__ == "__main__":
    main()
