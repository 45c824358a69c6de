"""The folders between a run and a step's arrays; imports nothing, so that whatever looks for them can."""

from __future__ import annotations

CHECKPOINTS = "checkpoints"
"""In a run's folder."""

ACTOR = "actor"
"""Between that and the steps, where reinforcement learning writes them."""

ITEMS = "items"
"""In a step's folder: what pre-training reads."""
