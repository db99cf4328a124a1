"""Rank and size of this process."""

from hora.horovod.env import get_env_rank_and_size

__all__ = ["get_env_rank_and_size"]
