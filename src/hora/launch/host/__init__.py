"""Processes on hosts, this one or others over ssh: the supervisor of a host, its workers, and the launcher that reaches
it.
"""
