"""Host staging, without a GPU: CPU tensors play the device's, so every copy is finished when it returns.

What pieces are staged, reduced and returned is the real thing; that streams are ordered is checked by
`tests/gpu`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rank_pool import ranks
from transport_checks import PIECE_BYTES, check_everything

from hora.engine.transport import staged
from hora.engine.transport.gloo import DistributedTransport


def everything(rank, size, store):
    cpu = DistributedTransport(store, rank, size, lambda: None, 60.0, address="127.0.0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged, "_PIECE_BYTES", PIECE_BYTES)
        patch.setattr(staged, "_record", lambda: SimpleNamespace(synchronize=lambda: None))
        transport = staged.StagedTransport(cpu)
        assert transport.name == "staged-gloo"
        results = check_everything(transport, rank, size)
        transport.close()
    cpu.close()
    return results


def test_every_operation_is_right():
    with ranks(2) as pool:
        first, second = pool.run(everything, 2)
        assert first == second
