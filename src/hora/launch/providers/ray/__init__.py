"""Processes on a Ray cluster: the launcher of elastic jobs there, and what Ray has to reserve for them."""
