"""Two-player games as environments, and the judge that says how strong a policy is at them."""
