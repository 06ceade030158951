"""What a step has left on a GPU goes back to the device.

Not yet run: needs a GPU.
"""

import pytest
import torch

from trainer.giving_back import GivingBack

pytestmark = pytest.mark.gpu

MIB = 2**20


def test_others_can_have_what_the_allocator_kept(gpu: torch.device) -> None:
    giving_back = GivingBack(gpu)
    stays = torch.ones(MIB, device=gpu)
    step = torch.ones(256 * MIB, device=gpu)
    del step
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info(gpu)
    told = giving_back.now()
    free_after, _ = torch.cuda.mem_get_info(gpu)
    assert free_after - free_before >= 4 * 250 * MIB
    assert told["perf/train_peak_bytes"] - told["perf/train_stays_bytes"] >= 4 * 250 * MIB
    assert giving_back.now()["perf/train_peak_bytes"] < 64 * MIB + stays.nbytes
