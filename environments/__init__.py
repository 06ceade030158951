"""The built-in environments. They use only the public API of `grpo`, as your own would."""

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
"""The class of each built-in environment, by `env[].id`."""
EXTRAS = {"openenv": "openenv", "game": "games", "textarena": "textarena"}
"""The extra of `grpo-pipeline[…]` that an environment needs, by `env[].id`. `reward: math` needs the extra `math`."""
