"""Networking: the authenticated wire protocol, its server and clients, and addresses."""
