"""The progress of one step of a distributed optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(slots=True)
class StepState:
    """Progress of one step, replaced as a whole, so that a skipped step leaves nothing behind.

    fresh --a gradient--> backward --synchronize, clipping, unscaling--> reduced --step, zero_grad, a gradient--> fresh

    Keyed by id: hashing a tensor runs Python code, and hooks run often.
    """

    passes: dict[int, int] = field(default_factory=dict)  # backward passes per gradient
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)  # parameters passed to the reducer, in order
    held_back: list[torch.Tensor] = field(default_factory=list)  # complete, but checked first (`finite`)
    hooked_later: list[torch.Tensor] = field(default_factory=list)  # complete once the user's own hooks have run
    backward_began: float = 0.0  # 0.0: no gradient yet
    blocked_s: float = 0.0  # the meter's total when backward began
    last_arrival: float = 0.0  # when the latest gradient became complete
    reduced: Literal["", "slices", "whole"] = ""  # "whole": in `.grad`
    synchronized: bool = False  # reduced by the user's synchronize(), after which step() warns
