"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import Chaos


@pytest.mark.slow
def test_chaos_of_a_few_faults(tmp_path: Path):
    Chaos(tmp_path, seed=1).run(4)
