"""CUDA tensors staged through host memory, tested without a GPU: CPU tensors replace the device's.
Every copy is thus complete when it returns. The copied portions and the results are real; `test_gpu.py` checks the
order of streams.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from groups import make_group
from transport_checks import PORTION_BYTES, check_everything

from hora.engine.transport import cuda_staging
from hora.engine.transport.distributed import DistributedTransport


@pytest.mark.ranks(2)
def test_every_operation_is_right(place):
    cpu = DistributedTransport(make_group("tcp", place.store, place.rank, place.size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_staging, "_PORTION_BYTES", PORTION_BYTES)
        patch.setattr(cuda_staging, "mark", lambda: SimpleNamespace(synchronize=lambda: None))
        transport = cuda_staging.CudaStagingTransport(cpu)
        assert transport.name == "staged-tcp"
        results = check_everything(transport, place.rank, place.size)
        transport.close()
    cpu.close()
    assert place.gather(results) == [results] * 2
