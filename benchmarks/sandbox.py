"""How many programs a second the sandbox runs, and how fast the cache finds a result.

    python -m benchmarks.sandbox [--check]

Programs: trivial ones, each in a sandbox of its own, as many at once as there are cores; the
median of several rounds, beside the processor time that one takes, for a machine that has other things to do.
Cache: a hit for a program of some 8,000 characters seen before in the same words, handed over as a new string each
time; and one in other words, which has to be parsed.
The last line is one JSON object. `--check` exits 1 where a figure misses its target.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import time

from orchestrator.sandbox import LocalSandbox, ResultCache

NUM_ROUNDS, PROGRAMS_A_ROUND, NUM_LOOKUPS = 5, 40, 2000
LEAST = {"programs_per_s": 20.0}
MOST = {"hit_us": 100.0}


async def programs() -> dict[str, float]:
    rates = []
    sandbox, spent = LocalSandbox(), os.times()
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        results = await asyncio.gather(*(sandbox.run("print(1)") for _ in range(PROGRAMS_A_ROUND)))
        rates.append(PROGRAMS_A_ROUND / (time.perf_counter() - began))
        assert all(result.stdout == b"1\n" and result.succeeded for result in results)
    now = os.times()
    began = time.perf_counter()
    await sandbox.run("print(1)")
    latency_s = time.perf_counter() - began
    cpu_s = sum(now[:4]) - sum(spent[:4])
    return {
        "programs_per_s": statistics.median(rates),
        "cpu_ms_per_program": 1000 * cpu_s / (NUM_ROUNDS * PROGRAMS_A_ROUND),
        "latency_ms": 1000 * latency_s,
    }


def lookups() -> dict[str, float]:
    program = "\n".join(f"def function_{number}(x):\n    return x * {number} + len(str(x))" for number in range(150))
    tests, cache = "t" * 100, ResultCache(float)
    cache.put(program, tests, 1.0)
    copies = [(program + " ")[:-1] for _ in range(NUM_LOOKUPS)]
    began = time.perf_counter()
    for copy in copies:
        assert cache.get(copy, tests) == 1.0
    hit_s = (time.perf_counter() - began) / NUM_LOOKUPS
    began = time.perf_counter()
    assert cache.get(program + "\n# in other words", tests) == 1.0
    return {"hit_us": 1e6 * hit_s, "hit_in_other_words_us": 1e6 * (time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its target")
    check = parser.parse_args().check
    figures = {name: round(value, 1) for name, value in {**asyncio.run(programs()), **lookups()}.items()}
    missed = [name for name, least in LEAST.items() if figures[name] < least]
    missed += [name for name, most in MOST.items() if figures[name] > most]
    for name, value in figures.items():
        print(f"{name:24} {value:>10}{'   misses its target' if name in missed else ''}")
    print(json.dumps({**figures, "cores": os.cpu_count(), "machine": platform.machine(), "missed": missed}))
    if check and missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
