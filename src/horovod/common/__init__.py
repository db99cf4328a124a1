"""The old package of what the fronts share."""
