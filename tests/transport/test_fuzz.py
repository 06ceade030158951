"""Damaged messages, files and control frames: each is read as what was sent, or refused."""

import contextlib
import random
import resource
import struct
from pathlib import Path

import pytest
from grpo.transport.batches.store import StepStore
from grpo.transport.batches.zmq import Ask
from grpo.transport.codec import decode, encode
from grpo.transport.errors import TransportError
from grpo.transport.folders import step_folder
from grpo.transport.records import BatchManifest, Canary, FileEntry, MicroBatch, PolicyManifest, Record

from tests.transport.samples import SPEC, canary, equal, micro_batch

HOSTILE = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF]
NUM_MESSAGES, NUM_MANIFESTS, NUM_FILES = 20_000, 2_000, 400


def mutate(rng: random.Random, message: bytes, others: list[bytes]) -> bytes:
    """Flips bits, cuts, repeats, splices with another message, or writes a hostile length somewhere."""
    data = bytearray(message)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            other = rng.choice(others)
            data[at:] = other[rng.randrange(len(other)) :]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 40)]
        elif kind == 4:
            width = rng.choice(["<B", "<I", ">I", ">H", ">Q"])
            value = rng.choice(HOSTILE) & (256 ** struct.calcsize(width) - 1)
            data[at : at + struct.calcsize(width)] = struct.pack(width, value)
        else:
            del data[at : at + rng.randint(1, 16)]
    return bytes(data)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_damaged_messages_are_refused_or_read_as_micro_batches_and_memory_stays_bounded() -> None:
    """What an attacker, or a bug of the sender, could make: checksums lie beside messages, and these have none."""
    plain, teacher = micro_batch(), micro_batch(lengths=(5,), teacher=True, per_token=True)
    hints = micro_batch(lengths=(4, 1, 6), teacher=True, extras=True)
    rng, originals = random.Random(0), [bytes(encode([batch])) for batch in (plain, teacher, hints)]
    before, num_read = peak_bytes(), 0
    for _ in range(NUM_MESSAGES):
        try:
            decoded = decode(mutate(rng, rng.choice(originals), originals))
        except TransportError:
            continue
        assert all(isinstance(batch, MicroBatch) for batch in decoded)
        num_read += 1
    assert 100 < num_read < NUM_MESSAGES // 2
    assert peak_bytes() - before < 64 << 20


@pytest.mark.parametrize("kind", [PolicyManifest, Canary])
def test_damaged_manifests_and_questions_are_refused_or_read(kind: type[Record]) -> None:
    files = {"rank_0.msgpack": FileEntry(size_bytes=7, digest="xxh3_128:00")}
    originals = [
        BatchManifest(run_id="run", step=1, files=files).to_json(),
        PolicyManifest(run_id="run", version=1, spec=SPEC, files=files).to_json(),
        canary().to_json(),
        Ask(run_id="run", rank=0, num_ranks=1, step=1).to_json(),
    ]
    rng = random.Random(1)
    for _ in range(NUM_MANIFESTS):
        with contextlib.suppress(TransportError):
            kind.from_json(mutate(rng, rng.choice(originals), originals))


def test_a_step_with_any_damaged_file_is_refused_or_read_as_it_was_sent(tmp_path: Path) -> None:
    store = StepStore(tmp_path, run_id="run")
    sent = micro_batch(lengths=(4, 3), teacher=True, extras=True)
    store.write(1, [encode([sent])])
    folder, rng = step_folder(tmp_path, 1), random.Random(2)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    for _ in range(NUM_FILES):
        path = rng.choice(list(originals))
        path.write_bytes(mutate(rng, originals[path], list(originals.values())))
        try:
            received = store.read(1, 0, 1)
        except TransportError:
            pass
        else:
            assert received is not None
            assert equal(received[0], sent)
        path.write_bytes(originals[path])
