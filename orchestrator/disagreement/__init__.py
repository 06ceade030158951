"""Where teachers agree with each other and not with the policy: preference pairs for direct preference optimization."""
