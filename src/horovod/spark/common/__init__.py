"""Shared parts of the estimators. Re-exports only."""
