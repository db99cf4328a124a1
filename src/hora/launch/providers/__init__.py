"""Providers: each starts an agent, or the workers themselves, in one kind of place."""
