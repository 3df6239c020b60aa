"""Atomic writing of a bundle: a hidden folder beside the output, renamed when it is complete."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from qwen3vl_export.bundle import MANIFEST, Bundle, Manifest
from qwen3vl_export.errors import ExportError

__all__ = ["BundleWriter"]

_MANIFEST_KEYS = {"format_version", "target", "precision", "components", "model"}
#: What later stages add to a bundle without listing it in the manifest.
_ADDED_FOLDER = "engines/"
_ADDED_FILE = "calibration.safetensors"


class BundleWriter:
    """Context manager around a temporary folder that `commit` turns into the bundle.

    Leaving it in any other way (an error, an interrupt) removes the temporary folder; an existing
    bundle at the output is replaced only by a complete one.
    """

    def __init__(self, output: Path, *, force: bool) -> None:
        """Check the output.

        Raises:
            ExportError: Something is there already, and `force` is not set, or it is not a bundle
                and nothing else.
        """
        # A link is followed: renaming the link itself would leave the old bundle behind.
        self._output = Path(os.path.realpath(output))
        self._force = force
        self._check_output()
        self._new_parents: list[Path] = []
        self.folder = Path()

    def __enter__(self) -> Self:
        """Create the temporary folder, beside the output so that a rename suffices."""
        parent = self._output.parent
        self._new_parents = [path for path in (parent, *parent.parents) if not path.exists()]
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self._output.name}.partial-", dir=parent))
        self.folder.chmod(0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove whatever was not committed."""
        with _interrupts_held():  # a second Ctrl-C must not leave half of it behind
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # those that hold anything, such as the bundle, stay
                for path in self._new_parents:
                    path.rmdir()

    def require_space(self, needed_bytes: int) -> None:
        """Raise ExportError unless the output's disk has room for `needed_bytes`."""
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise ExportError(
                f"the bundle needs {needed_bytes / 1e9:.2f} GB, but the disk of {self._output} "
                f"has {free / 1e9:.2f} GB free; free some space or choose another --output"
            )

    def commit(self, manifest: Manifest) -> Bundle:
        """Write the manifest and move the folder to the output, replacing an old bundle.

        An interrupt takes effect before the move or after it; the output is whole in both cases.
        """
        text = json.dumps(manifest.to_dict(), indent=2) + "\n"
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")
        # Opened before the move, after which nothing may fail any more.
        bundle = Bundle.open(self.folder, verify_hashes=False)
        self._check_output()
        with _interrupts_held():
            self._replace_output()
        return dataclasses.replace(bundle, path=self._output)

    def _replace_output(self) -> None:
        retired = self.folder.with_name(self.folder.name.replace(".partial-", ".old-"))
        try:
            if self._output.exists():
                self._output.rename(retired)
            self.folder.rename(self._output)
        except BaseException:
            # What is on disk tells how far it came: the error may follow a rename that was done.
            if retired.exists() and not self._output.exists():
                retired.rename(self._output)
            raise
        shutil.rmtree(retired, ignore_errors=True)

    def _check_output(self) -> None:
        output = self._output
        if output.is_symlink():
            raise ExportError(f"{output} is a link that leads to itself; choose another --output")
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return
        listed = _listed_files(output)
        if listed is None:
            raise ExportError(
                f"{output} exists and is not a bundle, so it is left alone; choose another --output"
            )
        foreign = _first_foreign_file(output, listed)
        if foreign is not None:
            raise ExportError(
                f"{output} holds {foreign}, which is no part of the bundle there, so it is left "
                "alone; move that file away or choose another --output"
            )
        if not self._force:
            raise ExportError(
                f"{output} already holds a bundle; add --force to replace it, or choose another "
                "--output"
            )


def _listed_files(folder: Path) -> set[str] | None:
    """The files its manifest lists; None when that is not one of ours, whatever its version."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not manifest.keys() >= _MANIFEST_KEYS:  # other tools name theirs the same
            return None
        entries = [*manifest.get("processor_files", ())]
        for component in manifest["components"].values():
            entries += component["files"]
        return {str(entry["path"]) for entry in entries}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def _first_foreign_file(folder: Path, listed: set[str]) -> str | None:
    """The first file that replacing the bundle would destroy although it is not the bundle's."""
    own = {*listed, MANIFEST, _ADDED_FILE}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_file = path.is_symlink() or not path.is_dir()
        if is_file and name not in own and not name.startswith(_ADDED_FOLDER):
            return name
    return None


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Put off SIGINT, SIGTERM and SIGHUP until the block has ended.

    Masking them would not do: another thread would take the signal, and Python would still run
    its handler in the main thread at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {getattr(signal, name): signal.getsignal(getattr(signal, name)) for name in names}
    # None is a handler that Python did not set and cannot set again; an ignored signal stays so.
    held = {s: h for s, h in handlers.items() if h not in (None, signal.SIG_IGN)}
    try:
        for signum in held:
            signal.signal(signum, note)
        yield
    finally:
        for signum, handler in held.items():
            signal.signal(signum, handler)
        if received:
            signal.raise_signal(received[0])
