"""Will it fit? `estimate` runs a training step without memory; `profile` measures one that runs; `plan` chooses settings."""

from .estimate import estimate
from .report import Report, compare

__all__ = ["Report", "compare", "estimate"]
