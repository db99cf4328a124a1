"""DDP training that survives deaths within a step. Read in this order: calls, settlement, protection, models."""

from __future__ import annotations

from hora.torch.protection.protect import protect

__all__ = ["protect"]
