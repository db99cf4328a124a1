"""Memory that the ranks of one host share: segments, counters, barriers, and reductions of data that lies in it."""
