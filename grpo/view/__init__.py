"""`grpo view`: a read-only page over the files of living and finished runs."""
