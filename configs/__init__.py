"""Settings of the three programs, and run presets as folders of YAML files."""
