"""`DistributedOptimizer` and what it is made of: how gradients are grouped, in which order, and how they are
reduced.
"""
