"""Processes on a Ray cluster: the launcher of elastic jobs, and their reservations."""
