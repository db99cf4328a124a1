"""`DistributedOptimizer` and its parts: the grouping, the order and the reduction of gradients."""
