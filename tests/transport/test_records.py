"""Records refuse what is not aligned; the codec gives back what it was given, and refuses everything else."""

import json
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from grpo.transport.codec import decode, encode
from grpo.transport.errors import CorruptError, SchemaVersionError, TransportError
from grpo.transport.records import SCHEMA_VERSION, BatchManifest, FileEntry, PolicyManifest, TrainingSample
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.transport.samples import HINT, SPEC, canary, equal, micro_batch

ENTRY = FileEntry(size_bytes=3, digest="sha256:0")
BATCH = BatchManifest(run_id="r", step=3, files={"rank_0.msgpack": ENTRY})
POLICY = PolicyManifest(run_id="r", version=3, spec=SPEC, files={"adapter_model.safetensors": ENTRY})
SEVERAL = replace(SPEC, adapters=("solver", "proposer"))


def test_positions_restart_at_each_sample() -> None:
    batch = micro_batch(lengths=(3, 1, 2))
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.starts.tolist() == [0, 3, 4]


def test_streams_with_one_number_a_sample_are_spread_over_its_tokens() -> None:
    batch = replace(micro_batch(lengths=(3, 2)), advantages=np.array([1, 2], np.float32))
    assert batch.per_token(batch.advantages).tolist() == [1, 1, 1, 2, 2]
    assert batch.policy_versions.tolist() == [3, 4, 4, 4, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sequence_lengths", np.array([3, 3], np.int32)),  # more than there are tokens
        ("sequence_lengths", np.array([5, 0], np.int32)),
        ("loss_mask", np.ones(5, np.bool_)),  # the first token of a sample cannot carry loss
        ("advantages", np.zeros(4, np.float32)),
        ("advantages", np.zeros(5, np.float64)),
        ("advantages", np.array([0, np.nan], np.float32)),
        ("inference_logprobs", np.array([0, 1, -np.inf, 0, 0], np.float32)),
        ("temperatures", np.zeros(2, np.float32)),
        ("token_ids", np.array([1, 2, -3, 4, 5], np.int32)),
        ("version_runs", np.array([[0, 4]], np.int32)),
        ("version_runs", np.array([[-1, 5]], np.int32)),
        ("version_runs", np.array([0, 5], np.int32)),
        ("hints", ((2, HINT),)),  # of a sample that is not there
        ("hints", ((1, HINT),)),  # of a place beyond its sample
        ("teacher_logprobs", np.zeros(4, np.float32)),
        ("adapters", np.zeros(5, np.int32)),
        ("adapters", np.array([0, -1], np.int32)),
        ("rollout_ids", ("a",)),
        ("index", 1),
    ],
)
def test_a_micro_batch_that_is_not_aligned_is_refused(field: str, value: object) -> None:
    with pytest.raises(CorruptError):
        decode(encode([replace(micro_batch(), **{field: value})]))


def test_micro_batches_of_different_steps_are_not_sent_together() -> None:
    one, other = (micro_batch(index=index, of=2, step=index + 1) for index in range(2))
    with pytest.raises(CorruptError):
        encode([one, other])


@pytest.mark.parametrize("name", ["advantages", "inference_logprobs", "temperatures"])
def test_what_a_receiver_would_refuse_is_not_sent(name: str) -> None:
    whole = micro_batch()
    values = getattr(whole, name).copy()
    values[-1] = np.inf
    with pytest.raises(CorruptError, match=name):
        encode([replace(whole, **{name: values})])


def test_a_sample_whose_versions_do_not_cover_it_is_refused() -> None:
    with pytest.raises(CorruptError):
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


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.booleans())
def test_micro_batches_survive_encoding(lengths: list[list[int]], teacher: bool) -> None:
    of = len(lengths)
    sent = [micro_batch(index=i, of=of, lengths=tuple(one), seed=i, teacher=teacher) for i, one in enumerate(lengths)]
    received = decode(encode(sent))
    assert len(received) == of
    assert all(equal(a, b) for a, b in zip(sent, received, strict=True))


def test_hints_pairs_and_adapters_survive_encoding_where_only_some_micro_batches_have_them() -> None:
    with_all = micro_batch(index=1, of=3, extras=True, per_token=True)
    pairs = (*with_all.pairs, replace(with_all.pairs[0], adapter=2))
    with_all = replace(with_all, adapters=np.array([1, 0], np.int32), pairs=pairs)
    sent = [micro_batch(index=0, of=3), with_all, micro_batch(index=2, of=3, extras=True)]
    assert all(equal(a, b) for a, b in zip(sent, decode(encode(sent)), strict=True))


def test_a_message_is_plain_messagepack_that_others_can_read() -> None:
    batch = micro_batch(lengths=(3, 2))
    version, data, header = msgpack.unpackb(encode([batch]))
    assert version == SCHEMA_VERSION
    assert (header["run_id"], header["step"]) == ("run", 1)
    first, count = next(iter(header["counts"].items()))
    assert first == "token_ids"
    assert np.frombuffer(data, "<i4", count=count[0]).tolist() == batch.token_ids.tolist()
    assert "adapters" not in header["counts"]  # nor a byte of what there is none of


def test_arrays_are_decoded_without_copying_aligned_and_read_only() -> None:
    for batch in decode(encode([micro_batch(index=index, of=2) for index in range(2)])):
        assert not batch.token_ids.flags.writeable
        assert batch.token_ids.flags.aligned
        assert not batch.advantages.flags.owndata


def test_all_streams_together_cost_at_most_16_bytes_a_token() -> None:
    # token ids, log-probabilities and the teacher's: 4 bytes each; the mask one; the rest is one number a sample
    size = len(encode([micro_batch(lengths=(2048,) * 4, teacher=True)]))
    assert 13 < size / (4 * 2048) < 13.5


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (SchemaVersionError, lambda fields: fields.__setitem__(0, 99)),
        (CorruptError, lambda fields: fields.append(0)),
        (CorruptError, lambda fields: fields[2].update(unknown=0)),
        (CorruptError, lambda fields: fields[2].update(step=-1)),
        (CorruptError, lambda fields: fields[2].update(run_id=None)),
        (CorruptError, lambda fields: fields[2]["counts"].update(token_ids=[1 << 40])),
        (CorruptError, lambda fields: fields[2]["counts"].update(loss_mask=[4])),
        (CorruptError, lambda fields: fields[2]["counts"].pop("temperatures")),
        (CorruptError, lambda fields: fields[2]["counts"].update(version_runs=[3])),
        (CorruptError, lambda fields: fields[2]["hints"][0][0].__setitem__(0, 7)),
        (CorruptError, lambda fields: fields[2]["hints"].append([])),
        (CorruptError, lambda fields: fields[2]["pairs"][0][0].update(source=3)),
        (CorruptError, lambda fields: fields.__setitem__(1, fields[1][:-1])),
        (CorruptError, lambda fields: fields.__setitem__(1, fields[1].replace(b"\0\1\1\0\1", b"\0\2\1\0\1"))),
    ],
)
def test_a_message_that_contradicts_itself_is_refused(
    kind: type[TransportError], change: Callable[[list[Any]], object]
) -> None:
    fields = msgpack.unpackb(encode([micro_batch(extras=True)]))
    change(fields)
    with pytest.raises(kind):
        decode(msgpack.packb(fields))


def test_manifests_and_canaries_survive_json() -> None:
    several = replace(POLICY, spec=SEVERAL, files=POLICY.files | {"adapters/proposer/canary.json": ENTRY})
    for record in (POLICY, several, BATCH, canary(), replace(canary(), noisy_logprobs=(-2.0, -0.5))):
        assert type(record).from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (SchemaVersionError, {"schema_version": 99}),
        (CorruptError, {"step": -1}),
        (CorruptError, {"files": {"rank_0.msgpack": {"size_bytes": 1}}}),
        *((CorruptError, {"files": {name: {"size_bytes": 1, "digest": ""}}}) for name in ("../a", "a/b", "")),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(kind: type[TransportError], change: dict[str, object]) -> None:
    with pytest.raises(kind):
        BatchManifest.from_json(json.dumps(json.loads(BATCH.to_json()) | change).encode())
    with pytest.raises(CorruptError):
        BatchManifest.from_json(b"[]")


@pytest.mark.parametrize("change", [{"kind": "other"}, {"adapters": ["a", "a"]}])
def test_a_policy_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    fields = json.loads(POLICY.to_json())
    with pytest.raises(CorruptError):
        PolicyManifest.from_json(json.dumps(fields | {"spec": fields["spec"] | change}).encode())


def test_files_lie_in_the_folders_of_the_adapters_alone() -> None:
    for spec, adapter in ((SPEC, "proposer"), (SEVERAL, "other")):
        with pytest.raises(CorruptError):
            replace(POLICY, spec=spec, files={f"adapters/{adapter}/canary.json": ENTRY})


@pytest.mark.parametrize("change", [{"logprobs": (-1.0,)}, {"token_ids": (1,)}, {"base_logprobs": (0.0, float("nan"))}])
def test_a_canary_that_proves_nothing_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        replace(canary(), **change)
