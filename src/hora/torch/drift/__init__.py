"""Comparison of ranks that must train the same model: watch compares, digest sums tensors, difference finds words."""
