"""Settings of all tests."""

import hypothesis

# Two shared cores: an example that takes long says nothing about the code.
hypothesis.settings.register_profile("grpo", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("grpo")
