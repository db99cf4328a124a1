"""What elastic training of every framework shares, under its old name."""

from hora.errors import HorovodInternalError, HostsUpdatedInterrupt
from hora.torch.elastic import ObjectState, State, notification_manager, run_fn
from hora.torch.elastic.notification import HostUpdateResult
from hora.torch.elastic.notification import NotificationManager as WorkerNotificationManager

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "WorkerNotificationManager",
    "notification_manager",
    "run_fn",
]
