"""How a worker hears of changed hosts, under its old name."""

from hora.torch.elastic.notification import HostUpdateResult
from hora.torch.elastic.notification import NotificationManager as WorkerNotificationManager

# The variables in which Horovod's workers find Horovod's rendezvous; ours have a secret and an address of their own.
HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"

__all__ = [
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_HOSTNAME",
    "HOROVOD_LOCAL_RANK",
    "HostUpdateResult",
    "WorkerNotificationManager",
]
