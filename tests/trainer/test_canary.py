from types import SimpleNamespace

from grpo.trainer.publishing import CANARY_TOKENS, canary_ids


def test_the_sequence_is_the_same_for_a_seed_and_another_for_another() -> None:
    one, same, other = (canary_ids(SimpleNamespace(vocab_size=259), seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert len(one) == CANARY_TOKENS


def test_special_tokens_and_the_end_of_the_vocabulary_are_avoided() -> None:
    config = SimpleNamespace(vocab_size=12, bos_token_id=0, eos_token_id=[2, 11])
    for seed in range(20):
        assert set(canary_ids(config, seed=seed)) <= {1, 3, 4, 5}
