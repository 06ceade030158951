"""Teachers: models beside the policy from which it learns token by token."""
