"""Text to token ids and back, with the tokenizer files of the checkpoint.

A thin layer over `tokenizers.Tokenizer`: `tokenizer.json` is used as it is, nothing is added to
the text, and `tokenizer_config.json` and `generation_config.json` only tell which tokens end or
pad a sequence.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qwen3vl_export.errors import BundleError, InputError

__all__ = ["StreamingDecoder", "Tokenizer", "read_json_object", "special_token_strings"]

_SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The byte-level BPE tokenizer of a Qwen3-VL checkpoint.

    Attributes:
        eos_token_ids: Tokens that end generation: those of `generation_config.json`, else the
            `eos_token` of `tokenizer_config.json`.
        pad_token_id: The padding token, or None when the checkpoint names none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int],
        pad_token_id: int | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Raises:
            BundleError: It is not a byte-level tokenizer.
        """
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise BundleError(
                f"expected a byte-level tokenizer, found the decoder {backend.decoder!r}; "
                "only tokenizers of the Qwen family are supported"
            )
        # A truncation saved in the file would cut long prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_processor_files(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint or of a bundle's `processor/` folder.

        Raises:
            BundleError: A file is missing or corrupt, or the files contradict each other.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BundleError(
                f"expected the tokenizer at {path}, found no such file; copy it from the checkpoint"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the Rust side raises bare Exception
            raise BundleError(
                f"expected a tokenizer in {path}, found a file that cannot be read ({e}); "
                "copy it from the checkpoint again"
            ) from e
        config_path = folder / "tokenizer_config.json"
        generation_path = folder / "generation_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        generation = read_json_object(generation_path) if generation_path.exists() else {}
        _check_added_tokens(backend, config)
        special = {
            name: _require_id(backend, token, f"tokenizer_config.json {name}")
            for name, token in special_token_strings(config).items()
            if name in ("eos_token", "pad_token")
        }
        eos = _eos_ids(generation, special.get("eos_token"))
        return cls(backend, eos, special.get("pad_token", _pad_id(generation)))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, added ones included; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens are those written in it, none is added.

        Raises:
            InputError: It holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: {error.reason} at character {error.start}"
            ) from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are not UTF-8 become U+FFFD.

        Ids beyond the tokenizer (a model's padded vocabulary rows) have no text.

        Raises:
            InputError: An id is negative.
        """
        ids = [int(i) for i in token_ids]
        if ids and min(ids) < 0:
            raise InputError(f"token ids must not be negative, found {min(ids)}")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token's string, or None for an id without one."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token string, or None."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes a token stands for; empty for a skipped special token or an unknown id."""
        token = self._backend.id_to_token(token_id)
        if token is None or (skip_special_tokens and token_id in self._special_ids):
            return b""
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        # An added token with a character outside the byte alphabet, e.g. a space, is literal text.
        return token.encode()


class StreamingDecoder:
    """Decodes token by token without ever giving out half a UTF-8 character.

    The strings returned by `push` and `finish`, joined, equal `Tokenizer.decode` of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        """Start an empty stream."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became complete with this token, often empty.

        Raises:
            InputError: The id is negative.
        """
        if token_id < 0:
            raise InputError(f"token ids must not be negative, found {token_id}")
        skip = self._skip_special_tokens
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, skip_special_tokens=skip))

    def finish(self) -> str:
        """End the stream; U+FFFD when its last character was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        BundleError: The file is missing, unreadable, or something else than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(
            f"expected a JSON file at {path}, found: {e}; copy it from the checkpoint again"
        ) from e
    if not isinstance(content, dict):
        raise BundleError(f"expected a JSON object in {path}, found {type(content).__name__}")
    return content


def special_token_strings(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`eos_token`, ...) of a `tokenizer_config.json`; null ones left out.

    Raises:
        BundleError: A token is neither a string nor an object with a string "content".
    """
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_KEYS:
        value = tokenizer_config.get(name)
        token = value.get("content") if isinstance(value, Mapping) else value
        if value is not None and not isinstance(token, str):
            raise BundleError(f"tokenizer_config.json: {name} must be a string, found {value!r}")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _check_added_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Refuse a tokenizer_config.json that belongs to another tokenizer.json."""
    if config.get("split_special_tokens") is True:
        raise BundleError(
            "tokenizer_config.json sets split_special_tokens, which would break the placeholders "
            "of images apart; remove it"
        )
    added = config.get("added_tokens_decoder")
    for token_id, entry in (added if isinstance(added, Mapping) else {}).items():
        token = entry.get("content") if isinstance(entry, Mapping) else None
        if not str(token_id).isdecimal() or backend.id_to_token(int(token_id)) != token:
            raise BundleError(
                f"tokenizer_config.json and tokenizer.json disagree: token {token_id} is {token!r} "
                "in the first only; take both files from the same checkpoint"
            )


def _require_id(backend: tokenizers.Tokenizer, token: str, origin: str) -> int:
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise BundleError(
            f"{origin} is {token!r}, which tokenizer.json does not have; take both files from the "
            "same checkpoint"
        )
    return token_id


def _eos_ids(generation: Mapping[str, Any], default: int | None) -> list[int]:
    value = generation.get("eos_token_id")
    listed = value if isinstance(value, list) else [default if value is None else value]
    ids = [i for i in listed if type(i) is int and i >= 0]
    if not ids or len(ids) != len(listed):
        raise BundleError(
            f"expected the token that ends generation as eos_token_id in generation_config.json or "
            f"eos_token in tokenizer_config.json, found {listed!r}; add it"
        )
    return ids


def _pad_id(generation: Mapping[str, Any]) -> int | None:
    value = generation.get("pad_token_id")
    if value is not None and (type(value) is not int or value < 0):
        raise BundleError(f"generation_config.json: pad_token_id must be an id, found {value!r}")
    return value


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, as `tokenizers`' ByteLevel uses it, inverted.

    Printable Latin-1 bytes stand for themselves; the others take the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()
