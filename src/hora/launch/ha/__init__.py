"""A job that outlives its leader: election, and the stores that hold its state."""
