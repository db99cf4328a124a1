"""The name under which `hora.workers` was documented first; old scripts import it."""

from hora.workers import *  # noqa: F403
from hora.workers import __all__ as __all__
