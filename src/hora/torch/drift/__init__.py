"""Whether the ranks still train one model: watch compares, digest sums up tensors, difference finds words."""
