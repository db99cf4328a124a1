"""The meeting place of programs that start their ranks themselves. Re-exports only."""

from hora.horovod.rendezvous_server import RendezvousHandler, RendezvousHTTPServer, RendezvousServer

__all__ = ["RendezvousHTTPServer", "RendezvousHandler", "RendezvousServer"]
