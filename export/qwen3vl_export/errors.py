"""Errors that a user can act on; the CLI prints them as `error: ...` and exits 1."""

from __future__ import annotations

__all__ = [
    "BundleError",
    "CheckpointError",
    "ContractError",
    "ExportError",
    "InputError",
    "MissingExtraError",
    "Qwen3VLError",
    "UnsupportedModelError",
]


class Qwen3VLError(Exception):
    """Base of every expected failure; its message says what was expected, found, and what to do."""


class UnsupportedModelError(Qwen3VLError):
    """The checkpoint is well-formed, but of a kind this toolkit does not convert."""


class CheckpointError(Qwen3VLError):
    """The checkpoint is missing, incomplete, corrupt, or its weights do not match its config."""


class ExportError(Qwen3VLError):
    """The export could not be finished; nothing was written."""


class BundleError(Qwen3VLError):
    """The bundle is missing, incomplete, corrupt, or made by an incompatible version."""


class ContractError(Qwen3VLError):
    """A graph or engine does not have the inputs and outputs its manifest promises."""


class InputError(Qwen3VLError):
    """A prompt, image, video or parameter given by the user cannot be used."""


class MissingExtraError(Qwen3VLError):
    """An optional dependency is needed; the message names the extra that installs it."""

    def __init__(self, purpose: str, extra: str, cause: ImportError) -> None:
        """Say that `purpose` needs the optional dependency group `extra`.

        Args:
            purpose: What the user asked for, e.g. "`export`".
            extra: Name of the extra in this distribution, e.g. "export".
            cause: The import failure; its module name is shown.
        """
        super().__init__(
            f"{purpose} needs the Python module {cause.name!r}, which is not installed; "
            f"install it with: pip install 'qwen3vl-export[{extra}]'"
        )
