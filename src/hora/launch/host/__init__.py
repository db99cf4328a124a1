"""Processes on hosts: a host's supervisor, its workers, and the launcher that reaches it."""
