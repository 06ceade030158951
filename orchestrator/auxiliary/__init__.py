"""The auxiliary losses: teachers, hints, preference pairs and evidence, beside the reward."""
