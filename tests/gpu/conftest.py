"""What the tests on a GPU share. They are skipped where there is none.

Not yet run: needs a GPU.
"""

import pytest
import torch


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", 0)
