"""The bytes behind a path, a `file://`, `data:` or `http(s)://` URL, and a name for error messages.

Nothing here knows what an image is. Network access happens in one function, and only when the
caller has allowed it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import time
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from qwen3vl_export.errors import InputError

__all__ = ["list_folder", "local_folder", "local_path", "read_source", "refuse_video_container"]

_MAX_DOWNLOAD_BYTES = 64 * 2**20
_DOWNLOAD_TIMEOUT_S = 30.0
_CHUNK_BYTES = 2**16

_REMOTE = ("http://", "https://")
_DATA = "data:"
_FILE = "file://"

_CONTAINER_SUFFIXES = frozenset(
    (
        *(".3gp", ".avi", ".flv", ".h264", ".hevc", ".m2ts", ".m4v", ".mkv", ".mov"),
        *(".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"),
    )
)


def read_source(source: object, allow_urls: bool) -> tuple[bytes, str]:
    """Read an encoded image.

    Args:
        source: Bytes, a path, a `file://` or `data:image/...;base64,` URL, or an `http(s)://` URL.
        allow_urls: Whether an `http(s)://` URL may be fetched.

    Returns:
        Its content, never empty, and what to call it in an error message.

    Raises:
        InputError: The source is of another type, cannot be read, or is empty.
    """
    if isinstance(source, bytes):
        data, name = source, f"the image given as {len(source)} bytes"
    elif isinstance(source, str) and source.lower().startswith(_REMOTE):
        name = repr(_shorten(source))
        if not allow_urls:
            raise InputError(f"fetching {name} is not allowed; pass allow_urls=True to allow it")
        data = _download(source, name)
    elif isinstance(source, str) and source.lower().startswith(_DATA):
        name = repr(_shorten(source))
        data = _decode_data_url(source, name)
    elif isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        name = repr(_shorten(str(text)))
        data = _read_file(local_path(text), name)
    else:
        raise InputError(
            "an image must be a Pillow image, a uint8 array, a path, a URL or the bytes of an "
            f"image file, found {type(source).__name__}"
        )
    if not data:
        raise InputError(f"expected an image, but {name} is empty")
    return data, name


def _read_file(path: Path | None, name: str) -> bytes:
    try:
        if path is None or not path.exists():
            raise InputError(
                f"the image file {name} does not exist; give an existing path (base64 text must "
                "start with 'data:image/')"
            )
        if path.is_dir():
            raise InputError(f"expected an image file, but {name} is a directory")
        # Reading a device or a pipe could block or never end.
        if not path.is_file():
            raise InputError(f"expected an image file, but {name} is not a regular file")
        return path.read_bytes()
    except (OSError, ValueError) as e:  # ValueError: text that cannot be a path at all
        reason = e.strerror if isinstance(e, OSError) else e
        raise InputError(f"the image file {name} cannot be read: {reason}") from e


def local_path(source: str | bytes) -> Path | None:
    """Return the path that a path or a `file://` URL names; None for another host's file.

    Raises:
        InputError: The path is not text, or the URL is malformed.
    """
    if not isinstance(source, str):
        raise InputError(f"a path must be text, found {type(source).__name__}")
    if source.lower().startswith(_FILE):
        url = _split_url(source)
        is_local = url.netloc in ("", "localhost")
        return Path(os.fsdecode(unquote_to_bytes(url.path))) if is_local else None
    return Path(source)


def local_folder(source: str | bytes) -> Path | None:
    """Return the folder that a path or a `file://` URL names; None where it names none.

    Raises:
        InputError: As `local_path`.
    """
    path = local_path(source)
    if path is None or str(source).lower().startswith((_DATA, *_REMOTE)):
        return None
    try:
        return path if path.is_dir() else None
    except (OSError, ValueError):  # too long for a path, say; reading it as a file tells why
        return None


def list_folder(folder: Path) -> list[Path]:
    """Return what a folder holds, hidden files apart, in natural order: frame2 before frame10.

    Raises:
        InputError: The folder cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as e:
        raise InputError(f"the folder {str(folder)!r} cannot be read: {e.strerror}") from e
    return sorted(paths, key=lambda path: (_natural_key(path.name), path.name))


def _natural_key(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", name.casefold())  # text, digits, text, digits, ..., text
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


def _decode_data_url(url: str, name: str) -> bytes:
    header, comma, payload = url.partition(",")
    if not comma or not re.fullmatch(r"data:image/[^,]*;base64", header, re.IGNORECASE):
        raise InputError(f"a data URL must start with 'data:image/<format>;base64,', found {name}")
    try:
        return base64.b64decode(b"".join(unquote_to_bytes(payload).split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise InputError(f"the data URL {name} does not hold valid base64: {e}") from e


def _download(url: str, name: str) -> bytes:
    # Imported here because it pulls in ssl and email, and few users fetch anything.
    import http.client
    import urllib.request

    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT_S
    data = bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "qwen3vl-export"})
        with urllib.request.urlopen(request, timeout=_DOWNLOAD_TIMEOUT_S) as response:
            while chunk := response.read1(_CHUNK_BYTES):
                data += chunk
                if len(data) > _MAX_DOWNLOAD_BYTES:
                    raise InputError(
                        f"{name} is larger than {_MAX_DOWNLOAD_BYTES} bytes; download it yourself "
                        "and pass the file"
                    )
                # The socket timeout bounds one read only; a slow sender could go on for ever.
                if time.monotonic() > deadline:
                    raise InputError(f"{name} took longer than {_DOWNLOAD_TIMEOUT_S:g} s to fetch")
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise InputError(f"{name} cannot be fetched: {e}") from e
    return bytes(data)


def refuse_video_container(source: str) -> None:
    """Refuse a path or URL whose suffix is that of a video container.

    Raises:
        InputError: It is one, and the message says how to extract the frames; or it is a URL that
            is malformed.
    """
    is_url = source.lower().startswith((_FILE, *_REMOTE))
    path = _split_url(source).path if is_url else source
    if os.path.splitext(path)[1].lower() in _CONTAINER_SUFFIXES:
        raise InputError(
            f"{_shorten(source)!r} is a video file, which is not decoded here; extract its frames, "
            "for example with `ffmpeg -i VIDEO -vf fps=2 FOLDER/%06d.png`, and pass the folder "
            "with raw_fps=2"
        )


def _split_url(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as e:
        raise InputError(f"{_shorten(url)!r} is not a valid URL ({e}); correct it") from e


def _shorten(text: str, limit: int = 160) -> str:
    """A long source with its middle left out: the end of a path is what tells files apart."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"
