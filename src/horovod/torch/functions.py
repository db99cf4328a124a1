"""The old module of the state functions: `hora.torch.functions` and `hora.torch.optimizer.state`."""

from hora.torch.functions import *
from hora.torch.optimizer.state import *
