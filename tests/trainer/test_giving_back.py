"""What only a step needs is given back when it is over."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.bench import Bench
from tests.trainer.models import CPU, tiny_batch
from trainer import giving_back
from trainer.errors import ModelError
from trainer.giving_back import GivingBack

STEP = """
import torch
from trainer.giving_back import GivingBack
from trainer.memory import keep_freed_memory

assert keep_freed_memory()
giving_back = GivingBack(torch.device("cpu"))

def step(num_mib):
    for _ in range(num_mib):
        kept.append(torch.ones(2**18))
    for one in kept[1::2]:
        one.add_(1)
    between = kept[::1024]  # so that the heap cannot shrink from its end alone
    kept.clear()
    return between

for num_mib in (400, 1):
    kept = []
    between = step(num_mib)
    told = giving_back.now()
    print(int(told["perf/train_peak_bytes"]), int(told["perf/train_stays_bytes"]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back")
def test_what_is_free_goes_back_to_the_system_although_it_is_kept_within_a_step() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], check=True, capture_output=True, text=True)
    (peak, stays), (next_peak, _) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert peak - stays > 380 * 2**20
    assert next_peak - stays < 20 * 2**20  # each step has its own peak


def test_on_a_gpu_it_is_what_the_allocator_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, reserved = [], [7]

    def empty() -> None:
        calls.append("empty")
        reserved[0] = 3

    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved[0])
    told = GivingBack(torch.device("cuda")).now()
    assert (told["perf/train_peak_bytes"], told["perf/train_stays_bytes"]) == (9.0, 3.0)
    assert calls == ["reset", "empty", "reset"]


def test_where_nothing_could_be_given_back_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(
        ModelError, match=r"sleep_mode: true gives memory back by glibc's malloc_trim.*sleep_mode: false"
    ):
        GivingBack(CPU)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives back")
def test_where_the_peak_cannot_be_reset_it_is_that_of_the_process_and_this_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "status").write_text("VmHWM:\t9 kB\nVmRSS:\t3 kB\n")
    (tmp_path / "clear_refs").mkdir()  # nobody can write it, root included
    monkeypatch.setattr(giving_back, "_PROCESS", tmp_path)
    told = GivingBack(CPU).now()
    assert (told["perf/train_peak_bytes"], told["perf/train_stays_bytes"]) == (9 * 1024.0, 3 * 1024.0)
    assert caplog.text.count("perf/train_peak_bytes will be the most since the process began") == 1


def test_a_trainer_gives_back_before_each_version_can_be_seen(tiny_model: Path, tmp_path: Path) -> None:
    bench, seen = Bench(tiny_model, tmp_path, max_steps=2, sleep_mode=True), list[int]()

    class Watching(GivingBack):
        def now(self) -> dict[str, float]:
            bench.trainer._publishing.flush()
            seen.append(max(bench.policies.versions, default=-1))
            return super().now()

    bench.trainer._giving_back = Watching(CPU)
    for step in (1, 2):
        bench.send(step, replace(tiny_batch((6, 9)), step=step))
    bench.finish(2)
    bench.trainer.train()
    bench.trainer.close()
    assert seen == [-1, 0, 1]
    told = bench.metrics(2)
    assert told["perf/train_peak_bytes"] >= told["perf/train_stays_bytes"] > 0


def test_a_trainer_that_takes_no_turns_keeps_its_memory_for_the_next_step(tiny_model: Path, tmp_path: Path) -> None:
    bench = Bench(tiny_model, tmp_path, max_steps=1)
    bench.send(1, tiny_batch((6, 9)))
    bench.finish(1)
    bench.trainer.train()
    bench.trainer.close()
    assert not {key for key in bench.metrics(1) if "stays" in key or "give_back" in key}
