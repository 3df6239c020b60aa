"""Atomic writing of a bundle: a hidden folder beside the output, renamed when it is complete."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from qwen3vl_export.bundle import MANIFEST, Bundle, Manifest
from qwen3vl_export.errors import ExportError

__all__ = ["BundleWriter"]


class BundleWriter:
    """Context manager around a temporary folder that `commit` turns into the bundle.

    Leaving it in any other way (an error, an interrupt) removes the temporary folder; an existing
    bundle at the output is replaced only by a complete one.
    """

    def __init__(self, output: Path, *, force: bool) -> None:
        """Check the output.

        Raises:
            ExportError: Something is there already, and `force` is not set or it is no bundle.
        """
        # A link is followed: renaming the link itself would leave the old bundle behind.
        self._output = output.resolve()
        self._force = force
        self._check_output()
        self.folder = Path()

    def __enter__(self) -> Self:
        """Create the temporary folder, beside the output so that a rename suffices."""
        parent = self._output.parent
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
        shutil.rmtree(self.folder, ignore_errors=True)

    def require_space(self, needed_bytes: int) -> None:
        """Raise ExportError unless the output's disk has room for `needed_bytes`."""
        free = shutil.disk_usage(self.folder).free
        if free < needed_bytes:
            raise ExportError(
                f"the bundle needs {needed_bytes / 1e9:.2f} GB, but the disk of {self._output} "
                f"has {free / 1e9:.2f} GB free; free some space or choose another --output"
            )

    def commit(self, manifest: Manifest) -> Bundle:
        """Write the manifest and move the folder to the output, replacing an old bundle."""
        text = json.dumps(manifest.to_dict(), indent=2) + "\n"
        (self.folder / MANIFEST).write_text(text, encoding="utf-8")
        self._check_output()
        retired = self.folder.with_name(self.folder.name.replace(".partial-", ".old-"))
        replacing = self._output.exists()
        if replacing:
            self._output.rename(retired)
        try:
            self.folder.rename(self._output)
        except BaseException:  # an interrupt, too, must not cost the old bundle
            if replacing:
                retired.rename(self._output)
            raise
        shutil.rmtree(retired, ignore_errors=True)
        return Bundle.open(self._output, verify_hashes=False)

    def _check_output(self) -> None:
        output = self._output
        if not output.exists() or (output.is_dir() and not any(output.iterdir())):
            return
        if not _is_bundle(output):
            raise ExportError(
                f"{output} exists and is not a bundle, so it is left alone; choose another --output"
            )
        if not self._force:
            raise ExportError(
                f"{output} already holds a bundle; add --force to replace it, or choose another "
                "--output"
            )


def _is_bundle(folder: Path) -> bool:
    """Whether the folder's manifest is one of ours; other tools name theirs the same."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "format_version" in manifest
