"""`DistributedOptimizer` and its parts: grouping, ordering and reducing gradients."""
