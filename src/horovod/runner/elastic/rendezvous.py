"""Horovod's rendezvous over HTTP, which Hora does not have: names for imports, and an error that says what to use."""

from typing import Any, NoReturn

GET_RANK_AND_SIZE = "rank_and_size"
PUT_WORKER_ADDRESSES = "worker_addresses"

__all__ = ["GET_RANK_AND_SIZE", "PUT_WORKER_ADDRESSES", "create_rendezvous_handler"]


def create_rendezvous_handler(driver: Any) -> NoReturn:
    raise ValueError("there is no rendezvous over HTTP here: use horovod.run(…, min_num_proc=…) for elastic jobs")
