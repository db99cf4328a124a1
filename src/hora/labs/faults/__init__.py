"""A training whose ranks are killed."""
