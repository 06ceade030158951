"""Preferences (DPO): teachers are asked what they would have done, and where they agree, not with the policy, it learns
to prefer their action."""
