"""Libraries are imported without what the product does not use, and it is there afterwards."""

import importlib.metadata
import importlib.util
import sys

import pytest
from grpo.transport.imports import hidden_modules, import_transformers_by_names


def test_a_hidden_module_is_not_installed_until_the_end() -> None:
    sys.modules.pop("wave", None)
    with hidden_modules("wave", "json"):
        assert importlib.util.find_spec("wave") is None
        assert importlib.util.find_spec("json")  # has been imported, and stays
        with pytest.raises(ImportError):
            import wave
    import wave

    assert wave.__name__ == "wave"


def test_a_module_called_as_its_distribution_is_found_as_among_all_files() -> None:
    everything = importlib.metadata.packages_distributions()
    with import_transformers_by_names():
        by_names = importlib.metadata.packages_distributions()
    assert importlib.metadata.packages_distributions() == everything
    for name in ("torch", "transformers", "accelerate", "huggingface_hub"):
        [one] = by_names[name]
        assert importlib.metadata.version(one) == importlib.metadata.version(everything[name][0])
