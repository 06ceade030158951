"""An environment whose Proposer has nothing to learn, while its Solvers have."""

from orchestrator.envs.proposer_solver import ProposerSolver
from orchestrator.rollouts.rubric import Rubric


def even(completion, state) -> float:  # type: ignore[no-untyped-def]
    """The same for every proposal, so that its advantage is 0."""
    return 0.5


class EvenProposer(ProposerSolver):
    """As `proposer-solver`, but every proposal is worth the same."""

    def __init__(self, **args: object) -> None:
        super().__init__(**args)  # type: ignore[arg-type]
        self.rubric = Rubric([even])
