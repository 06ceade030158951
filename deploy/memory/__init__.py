"""What the trainer needs of a device's memory, and what it leaves to the server: estimated, measured, told.

The estimate is arithmetic on settings and config.json, without torch. Only `dry_step` loads a model.
"""
