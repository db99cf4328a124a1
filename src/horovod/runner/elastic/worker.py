"""How a worker hears of changed hosts, under its old name."""

from hora.torch.elastic.notification import HostUpdateResult
from hora.torch.elastic.notification import NotificationManager as WorkerNotificationManager

__all__ = ["HostUpdateResult", "WorkerNotificationManager"]
