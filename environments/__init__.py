"""The environments that come with the product, written as people write theirs: from what `grpo` has for everybody."""

BUILT_IN = {
    "reverse-text": "grpo.environments.reverse_text:ReverseText",
    "arithmetic": "grpo.environments.arithmetic:Arithmetic",
    "zorplex": "grpo.environments.zorplex:Zorplex",
    "debate": "grpo.environments.debate:Debate",
    "proposer-solver": "grpo.environments.proposer_solver:ProposerSolver",
    "critique": "grpo.environments.critique.critique:Critique",
    "game": "grpo.environments.games.environment:Games",
    "textarena": "grpo.environments.games.textarena:TextArena",
    "dataset": "grpo.environments.data.dataset:Dataset",
    "verifiers": "grpo.environments.verifiers:Verifiers",
    "openenv": "grpo.environments.openenv:OpenEnv",
}
"""Classes by `env[].id`."""
EXTRAS = {"openenv": "openenv", "game": "games", "textarena": "textarena"}
"""What of `grpo-pipeline[…]` an environment needs, by `env[].id`; `reward: math` needs `math` besides."""
