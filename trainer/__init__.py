"""The trainer: policy-gradient steps on packed micro-batches, a policy version after each."""
