"""Ranks agree before they go on: an error on one becomes an error, with the same words, on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..comm import Group
from ..errors import CheckpointError, ConfigError, StateError

T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {"ConfigError": ConfigError, "StateError": StateError}


def together(group: Group, doing: str, action: Callable[[], T]) -> T:
    """`action()` on this rank, once every rank's has succeeded.

    Where one raised an Exception, all raise: ConfigError or StateError if that is what it was, else CheckpointError.
    One object gather over `group`; every rank must call it, whatever happened to it before.
    """
    value, error, report = None, None, None
    try:
        value = action()
    except Exception as caught:
        error, report = caught, (type(caught).__name__, _words(caught))
    said = group.all_gather_object(report)
    failed = {rank: text for rank, text in enumerate(said) if text is not None}
    if not failed:
        return value  # type: ignore[return-value]
    kinds = {kind for kind, _ in failed.values()}
    cls = _KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    texts: dict[str, list[int]] = {}
    for rank, (_, text) in failed.items():
        texts.setdefault(text, []).append(rank)
    lines = [f"{text}{_where(ranks, group.size)}" for text, ranks in texts.items()]
    raise cls(f"{doing} failed: " + "\n".join(lines)) from error


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    own = isinstance(error, (CheckpointError, ConfigError, StateError, OSError))
    return str(error) if own else f"{type(error).__name__}: {error}"


def _where(ranks: list[int], size: int) -> str:
    if len(ranks) == size:
        return ""
    return f" (rank {', '.join(map(str, ranks))} of {size})"


def same_everywhere(group: Group, value: Any) -> bool:
    """True on all ranks where all ranks' picklable values are equal. One object gather."""
    values = group.all_gather_object(value)
    return all(other == values[0] for other in values)
