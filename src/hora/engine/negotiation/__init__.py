"""Negotiation: how the members of a process set learn which operations are ready on all of them."""
