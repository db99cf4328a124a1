"""Elastic training: state that survives the loss of workers, a resumable sampler, and the training loop."""

from hora.torch.elastic.handlers import ElasticSampler
from hora.torch.elastic.loop import run, run_fn
from hora.torch.elastic.state import ObjectState, State, notification_manager
from hora.torch.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "notification_manager", "run", "run_fn"]
