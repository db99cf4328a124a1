"""The shape that torch gives a backend in Python: before 2.14 a whole group, then a backend for each device of one."""

from __future__ import annotations

from torch._C import _distributed_c10d as c10d

# The class has a constructor for Python: `__init__(self, rank, size)`.
HAS_BACKENDS = "rank" in (c10d.Backend.__init__.__doc__ or "")
