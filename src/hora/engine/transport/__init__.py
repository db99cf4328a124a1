"""Transports: how the members of a process set move the tensors of a batch. `factory` chooses one."""
