"""Nodes that come by themselves: one agent on each, started by the platform, instead of ssh."""
