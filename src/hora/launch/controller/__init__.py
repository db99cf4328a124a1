"""The controller of a job, in the process that started it: decisions, membership, rendezvous, output."""
