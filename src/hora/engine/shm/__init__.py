"""Shared memory of the ranks of one host: segments, counters, barriers, and reductions in place."""
