"""`DistributedOptimizer(..., sharded=True)`: one copy of parameters and state per host, one slice per rank."""
