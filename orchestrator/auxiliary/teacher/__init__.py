"""The teacher of on-policy distillation: a model from which the policy learns token by token."""
