from trainer.canary import CANARY_TOKENS, canary_ids


def test_the_sequence_is_the_same_for_a_seed_and_another_for_another() -> None:
    one, same, other = (canary_ids(seed=seed, vocab_size=259, special_ids=frozenset()) for seed in (1, 1, 2))
    assert one == same != other
    assert len(one) == CANARY_TOKENS


def test_special_tokens_and_the_end_of_the_vocabulary_are_avoided() -> None:
    for seed in range(20):
        ids = canary_ids(seed=seed, vocab_size=12, special_ids=frozenset({0, 2, 11}))
        assert set(ids) <= {1, 3, 4, 5}
