"""`DistributedOptimizer(..., sharded=True)`: one copy of parameters and optimizer state on a host, a slice for each
rank.
"""
