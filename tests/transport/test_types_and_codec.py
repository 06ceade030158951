"""Records refuse what is not aligned; the codec gives back what it was given, and refuses everything else."""

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.transport.samples import HINT, SPEC, canary, equal, micro_batch
from transport.codec import decode, encode
from transport.errors import CorruptError, SchemaVersionError, TransportError
from transport.records import BatchManifest, Canary, FileEntry, PolicyManifest, TrainingSample


def test_positions_restart_at_each_sample() -> None:
    batch = micro_batch(lengths=(3, 1, 2))
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.starts.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sequence_lengths", np.array([3, 3], np.int32), "sum to 6, expected 5"),
        ("sequence_lengths", np.array([5, 0], np.int32), "sequence_lengths reach from 0 to 5, expected 1.."),
        ("loss_mask", np.ones(5, np.bool_), "first token of a sample"),
        ("advantages", np.zeros(4, np.float32), "expected float32[5]"),
        ("advantages", np.array([0, np.nan], np.float32), "advantages has values that are not finite"),
        ("inference_logprobs", np.array([0, 1, -np.inf, 0, 0], np.float32), "not finite"),
        ("temperatures", np.zeros(2, np.float32), "not above 0"),
        ("token_ids", np.array([1, 2, -3, 4, 5], np.int32), "token_ids has the negative number -3"),
        ("version_runs", np.array([[0, 4]], np.int32), "version_runs cover 4 tokens, expected 5"),
        ("version_runs", np.array([0, 5], np.int32), "version_runs is int32[2], expected int32[runs, 2]"),
        ("hints", ((2, HINT),), "a hint for sample 2, there are 2"),
        ("hints", ((1, HINT),), "student_index is not ascending from 1 to at most 1"),
        ("advantages", np.zeros(5, np.float64), "advantages is float64[5], expected float32[5]"),
        ("teacher_logprobs", np.zeros(4, np.float32), "teacher_logprobs"),
        ("adapters", np.zeros(5, np.int32), "adapters is int32[5], expected int32[2]"),
        ("adapters", np.array([0, -1], np.int32), "adapters reach from -1 to 0, expected 0.."),
        ("rollout_ids", ("a",), "1 rollout ids for 2 samples"),
        ("index", 1, "index 1 of 1"),
    ],
)
def test_a_micro_batch_that_is_not_aligned_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CorruptError) as error:
        replace(micro_batch(), **{field: value})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_streams_with_one_number_a_sample_are_spread_over_its_tokens() -> None:
    batch = replace(micro_batch(lengths=(3, 2)), advantages=np.array([1, 2], np.float32))
    assert batch.per_token(batch.advantages).tolist() == [1, 1, 1, 2, 2]
    assert batch.policy_versions.tolist() == [3, 4, 4, 4, 4]


def test_a_sample_whose_versions_do_not_cover_it_is_refused() -> None:
    with pytest.raises(CorruptError, match="cover 2 tokens, expected 3"):
        TrainingSample(
            token_ids=np.arange(3, dtype=np.int32),
            loss_mask=np.array([False, True, True]),
            inference_logprobs=np.zeros(3, np.float32),
            advantages=1.0,
            temperatures=1.0,
            policy_versions=((0, 2),),
            env="e",
            group_id="0",
            rollout_id="0/0",
            reward=1.0,
            stop_reason="stop",
        )


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=0, max_size=4), st.booleans())
def test_micro_batches_survive_encoding(lengths: list[list[int]], teacher: bool) -> None:
    of = len(lengths)
    sent = [micro_batch(index=i, of=of, lengths=tuple(one), seed=i, teacher=teacher) for i, one in enumerate(lengths)]
    received = decode(encode(sent))
    assert len(received) == of
    assert all(equal(a, b) for a, b in zip(sent, received, strict=True))


def test_adapters_survive_encoding() -> None:
    batch = micro_batch(lengths=(3, 2), extras=True)
    pairs = (*batch.pairs, replace(batch.pairs[0], adapter=2))
    sent = replace(batch, adapters=np.array([1, 0], np.int32), pairs=pairs)
    [received] = decode(encode([sent]))
    assert equal(sent, received)
    assert [pair.adapter for pair in received.pairs] == [0, 2]


def test_a_message_of_one_adapter_has_not_a_byte_of_others() -> None:
    message = encode([micro_batch(extras=True)])
    _, header_len, _ = struct.unpack_from("<4sIQ", message)
    [fields] = msgpack.unpackb(message[16 : 16 + header_len])["micro_batches"]
    assert "adapters" not in fields["streams"]
    assert [len(pair) for pair in fields["pairs"]] == [3]
    manifest = PolicyManifest(run_id="r", version=3, attempt=0, spec=SPEC, files={})
    assert b"adapters" not in manifest.to_json()


def test_a_pair_for_an_adapter_that_cannot_be_is_refused() -> None:
    for adapter in (-1, 1 << 40):
        with pytest.raises(CorruptError, match=f"adapter {adapter}, expected 0 or more"):
            replace(micro_batch(extras=True).pairs[0], adapter=adapter)


def test_arrays_are_decoded_without_copying_and_read_only() -> None:
    (batch,) = decode(encode([micro_batch()]))
    assert not batch.token_ids.flags.writeable
    assert not batch.advantages.flags.owndata


def test_all_streams_together_cost_at_most_16_bytes_a_token() -> None:
    batch = micro_batch(lengths=(2048,) * 4, teacher=True)
    # token ids, log-probabilities and the teacher's: 4 bytes each; the mask one bit; the rest is one number a sample
    size = len(encode([batch]))
    assert 12 < size / (4 * 2048) < 12.5


@given(st.data())
def test_damaged_messages_are_refused_or_read_as_micro_batches(data: st.DataObject) -> None:
    message = bytearray(encode([micro_batch(lengths=(4, 3), teacher=True, extras=True)]))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    message = message[: data.draw(st.integers(0, len(message)))]
    with suppress(TransportError):
        decode(bytes(message))


def resealed(message: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The message with a changed header and the right checksums."""
    _, header_len, _ = struct.unpack_from("<4sIQ", message)
    fields = msgpack.unpackb(message[16 : 16 + header_len])
    change(fields)
    header: bytes = msgpack.packb(fields)
    prefix = struct.pack("<4sIQ", b"GRPO", len(header), xxhash.xxh3_64_intdigest(header))
    return prefix + header + bytes(-len(header) % 8) + message[16 + header_len + -header_len % 8 :]


def test_a_message_of_another_schema_version_is_refused() -> None:
    with pytest.raises(SchemaVersionError, match="schema version 99"):
        decode(resealed(encode([micro_batch()]), lambda header: header.update(schema_version=99)))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(CorruptError, match=r"micro-batch has the fields .*'extra'"):
        decode(resealed(encode([micro_batch()]), lambda header: header["micro_batches"][0].update(extra=1)))


def test_manifests_and_canaries_survive_json() -> None:
    files = {"a.bin": FileEntry(size_bytes=3, digest="sha256:00")}
    policy = PolicyManifest(run_id="r", version=3, attempt=0, spec=SPEC, files=files)
    batch = BatchManifest(run_id="r", step=3, attempt=0, files=files)
    assert PolicyManifest.from_json(policy.to_json()) == policy
    assert BatchManifest.from_json(batch.to_json()) == batch
    assert Canary.from_json(canary().to_json()) == canary()
    noisy, noisy_policy = replace(canary(), noisy_logprobs=(-2.5, -0.75)), replace(SPEC, norm_noise=True)
    assert Canary.from_json(noisy.to_json()) == noisy
    policy = replace(policy, spec=noisy_policy)
    assert PolicyManifest.from_json(policy.to_json()) == policy


SEVERAL = replace(SPEC, adapters=("solver", "proposer"))


def test_a_manifest_lists_files_in_the_folders_of_its_adapters_and_in_no_others() -> None:
    entry = FileEntry(size_bytes=3, digest="sha256:00")
    policy = PolicyManifest(run_id="r", version=3, attempt=0, spec=SEVERAL, files={"adapters/proposer/a.bin": entry})
    assert PolicyManifest.from_json(policy.to_json()) == policy
    elsewhere = (
        *("adapters/solver/a", "adapters/a", "adapters/proposer/", "adapters/proposer/..", "/a"),
        *("adapters/proposer/b/a", "adapters/proposer/../a", "adapters\\proposer\\a"),
    )
    for name in elsewhere:
        with pytest.raises(CorruptError, match="expected a plain file name"):
            PolicyManifest.from_json(replace(policy, files={name: entry}).to_json())
    with pytest.raises(CorruptError, match="expected a plain file name"):
        PolicyManifest.from_json(replace(policy, spec=SPEC).to_json())


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", ".."], ["a", "b/c"], ["a", ""], ["a", 3], "ab"])
def test_a_manifest_of_adapters_that_no_folders_could_be_called_is_refused(names: object) -> None:
    fields = json.loads(PolicyManifest(run_id="r", version=3, attempt=0, spec=SEVERAL, files={}).to_json())
    fields["spec"]["adapters"] = names
    with pytest.raises(CorruptError, match="adapters"):
        PolicyManifest.from_json(json.dumps(fields).encode())


def test_a_policy_that_does_not_say_whether_it_may_have_noise_is_refused() -> None:
    policy = json.loads(PolicyManifest(run_id="r", version=3, attempt=0, spec=SPEC, files={}).to_json())
    policy["spec"]["norm_noise"] = 1
    with pytest.raises(CorruptError, match="norm_noise = 1, expected true or false"):
        PolicyManifest.from_json(json.dumps(policy).encode())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema_version", 2, "schema version 2"),
        ("step", -1, "step = -1"),
        ("step", True, "step = True"),
        ("run_id", None, "run_id = None"),
        ("files", {"../x": {"size_bytes": 1, "digest": ""}}, "expected a plain file name"),
        ("files", {"x": 3}, "expected a plain file name with size and digest"),
        ("files", [], "no files"),
    ],
)
def test_a_manifest_with_a_bad_field_is_refused(field: str, value: object, message: str) -> None:
    manifest = BatchManifest(run_id="r", step=1, attempt=0, files={})
    fields = json.loads(manifest.to_json()) | {field: value}
    with pytest.raises(TransportError) as error:
        BatchManifest.from_json(json.dumps(fields).encode())
    assert message in str(error.value)


def test_a_canary_that_is_not_finite_or_not_aligned_is_refused() -> None:
    with pytest.raises(CorruptError, match="not finite"):
        replace(canary(), logprobs=(float("nan"), 0.0))
    with pytest.raises(CorruptError, match="has 1 logprobs, expected 2"):
        replace(canary(), logprobs=(0.0,))
    with pytest.raises(CorruptError, match="has 3 noisy_logprobs, expected 2"):
        replace(canary(), noisy_logprobs=(0.0, 0.0, 0.0))
    with pytest.raises(CorruptError, match="has noisy_logprobs that are not finite"):
        replace(canary(), noisy_logprobs=(0.0, float("inf")))
