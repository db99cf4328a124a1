"""Processes on hosts, local or over ssh: a host's supervisor, its workers, and the launcher that reaches it."""
