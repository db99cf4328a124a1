"""What elastic training of every framework shares, under its old name."""

from hora.torch.elastic import ObjectState, State, notification_manager, run_fn

__all__ = ["ObjectState", "State", "notification_manager", "run_fn"]
