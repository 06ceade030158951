"""Settings of all tests."""

import os

# For tiny tensors a second thread only spins between them, at many times the work itself. Read when torch is imported,
# here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

# Two shared cores: an example that takes long says nothing about the code.
hypothesis.settings.register_profile("grpo", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("grpo")
