"""The network: the authenticated wire, the one server that lets connections in, its clients, and addresses."""
