"""The orchestrator's side of the inference servers: requests, the pool, which version each serves, sleep."""
