"""Nodes: one agent on each, started by the platform, by srun or by ssh."""
