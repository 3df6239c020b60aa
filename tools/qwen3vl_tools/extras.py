"""Turns the import failure of an optional dependency into a sentence that names its extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from qwen3vl_export.errors import MissingExtraError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(purpose: str, extra: str) -> Iterator[None]:
    """Wrap the imports that `purpose` needs from the optional dependency group `extra`.

    Raises:
        MissingExtraError: A third-party module is missing. A failure inside this project's own
            packages is a bug and passes through.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("qwen3vl_"):
            raise
        raise MissingExtraError(purpose, extra, error) from error
