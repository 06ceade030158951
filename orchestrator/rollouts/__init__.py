"""Everything that is rolled out is an episode: a role acts, a rubric scores, a credit assigner gives advantages."""
