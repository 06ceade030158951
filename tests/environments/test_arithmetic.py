"""The built-in `arithmetic`."""

from grpo.environments import arithmetic
from grpo.environments.arithmetic import Arithmetic

from tests.orchestrator.rollouts.contexts import score_of


def test_training_and_evaluation_share_no_problem_also_turned_round() -> None:
    environment = Arithmetic(max_operand=20, num_train=3000, num_eval=200)
    train, held_out = ({example["prompt"] for example in environment.dataset(split)} for split in ("train", "eval"))
    assert len(environment.dataset("eval")) == 200
    turned = {
        arithmetic.prompt((second, operation, first))
        for first in range(21)
        for second in range(21)
        for operation in "+*"
        if arithmetic.prompt((first, operation, second)) in held_out
    }
    assert turned
    assert not train & (held_out | turned)


async def test_an_answer_is_right_as_a_number_alone_or_at_the_end_of_an_explanation() -> None:
    rubric, example = Arithmetic().rubric, {"prompt": "Compute: 3-8", "answer": "-5"}
    given = ["-5", " -5\n", r"Eight is five more, so it is \boxed{-5}", "5", "-50", "", "it is more"]
    scores = [await score_of(rubric, completion, example) for completion in given]
    assert [score.reward for score in scores] == [1, 1, 1, 0, 0, 0, 0]
    assert scores[0].metrics == {"correct": 1.0}
    assert scores[0].accuracy == 1.0


async def test_the_question_itself_is_no_answer_to_it() -> None:
    environment = Arithmetic(num_train=30)
    for example in environment.dataset("train"):
        question = example["prompt"].removeprefix("Compute: ")
        for copied in (question, example["prompt"], rf"\boxed{{{question}}}", f"{question} = {question}"):
            assert (await score_of(environment.rubric, copied, example)).reward == 0, copied
        assert (await score_of(environment.rubric, f"{question}={example['answer']}", example)).reward == 1
