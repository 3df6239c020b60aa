"""`qwen3vl-export run`: ask a bundle one question."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_export.errors import InputError
from qwen3vl_tools.extras import needs_extra

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from qwen3vl_runtime import GenerationResult, ORTRunner, SamplingParams

__all__ = ["add_parser"]

_SAMPLING_FLAGS = (
    ("--max-new-tokens", int, "most tokens to generate"),
    ("--temperature", float, "0 is greedy"),
    ("--top-k", int, "draw from the k most likely tokens"),
    ("--top-p", float, "draw from the most likely tokens of this total probability"),
    ("--min-p", float, "drop tokens less likely than this fraction of the likeliest"),
    ("--repetition-penalty", float, "above 1 discourages repeating tokens"),
    ("--seed", int, "of the draws"),
)
_VIDEO_OPTIONS = ("fps", "raw_fps")
_MEDIA_OPTIONS = ("min_pixels", "max_pixels", *_VIDEO_OPTIONS)


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="ask a bundle about images, videos and text",
        description="Answer one prompt. Images and videos come before the text, in the order "
        "given. A video is a folder of frames or an animated image.",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, help="bundle folder")
    parser.add_argument("--prompt", help="the question")
    for kind in ("image", "video"):
        parser.add_argument(
            f"--{kind}", action=_AppendMedia, dest="media", metavar="PATH", help="may be repeated"
        )
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--messages", type=Path, metavar="FILE", help="JSON chat messages instead of --prompt"
    )
    for flag, kind_of_value, text in _SAMPLING_FLAGS:
        parser.add_argument(flag, type=kind_of_value, help=text)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer")
    parser.add_argument("--min-pixels", type=int, help="smallest area an image is resized to")
    parser.add_argument("--max-pixels", type=int, help="largest area an image is resized to")
    parser.add_argument("--fps", type=float, help="video frames to sample a second")
    parser.add_argument("--raw-fps", type=float, help="frames a second of a folder of frames")
    parser.add_argument("--capacity", type=int, help="most tokens of prompt and answer")
    parser.add_argument("--prefill-chunk", type=int, help="prompt tokens run in one call")
    parser.add_argument("--threads", type=int, help="default: all physical cores")
    parser.add_argument("--allow-urls", action="store_true", help="let sources be http(s) URLs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run, media=[])


class _AppendMedia(argparse.Action):
    """Collects --image and --video into one list, since their order is part of the prompt."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        namespace.media = [*namespace.media, (option_string.lstrip("-"), values)]


def _run(args: argparse.Namespace) -> int:
    if sys.stdout is None:  # which Python makes of a closed one; print would say nothing
        raise InputError(
            "standard output is closed, so the answer would be lost; open or redirect it"
        )
    messages = _messages(args)
    with needs_extra("`run`", "cpu"):
        from qwen3vl_runtime import ORTRunner, SamplingParams
    names = [flag.lstrip("-").replace("-", "_") for flag, _, _ in _SAMPLING_FLAGS]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    params = SamplingParams(**given, stop=tuple(args.stop))
    limits = {
        name: getattr(args, name)
        for name in ("capacity", "prefill_chunk", "threads")
        if getattr(args, name) is not None
    }
    runner = ORTRunner(args.bundle, allow_urls=args.allow_urls, **limits)
    if args.json:
        print(json.dumps(runner.generate(messages, params).to_dict()))
    else:
        _print_stream(runner, messages, params)
    return 0


def _messages(args: argparse.Namespace) -> list[dict[str, Any]]:
    if (args.prompt is None) == (args.messages is None):
        raise InputError("give either --prompt or --messages")
    _refuse_idle_options(args)
    if args.messages is not None:
        if args.media or args.system is not None:
            raise InputError("--messages holds the whole chat; drop --image, --video and --system")
        return _read_messages(args.messages)
    content = [_media_part(args, kind, source) for kind, source in args.media]
    content.append({"type": "text", "text": args.prompt})
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": content}]


def _refuse_idle_options(args: argparse.Namespace) -> None:
    """An option that changes nothing is a mistake that the user should hear of."""
    kinds = {kind for kind, _ in args.media}
    for name in _MEDIA_OPTIONS:
        users = {"video"} if name in _VIDEO_OPTIONS else {"image", "video"}
        if getattr(args, name) is not None and not users & kinds:
            flags = " or ".join(f"--{kind}" for kind in sorted(users))
            raise InputError(f"--{name.replace('_', '-')} has no effect without {flags}")


def _media_part(args: argparse.Namespace, kind: str, source: str) -> dict[str, Any]:
    options = [name for name in _MEDIA_OPTIONS if kind == "video" or name not in _VIDEO_OPTIONS]
    given = {name: getattr(args, name) for name in options if getattr(args, name) is not None}
    return {"type": kind, kind: source, **given}


def _read_messages(path: Path) -> list[dict[str, Any]]:
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"--messages {path} is not a readable JSON file: {error}") from error
    if not isinstance(messages, list):
        raise InputError(f"--messages {path} must hold a list of chat messages")
    return messages


def _print_stream(
    runner: ORTRunner, messages: list[dict[str, Any]], params: SamplingParams
) -> None:
    for chunk in runner.stream(messages, params):
        print(chunk.text, end="", flush=True)
        if chunk.result is not None:
            print()
            print(_summary(chunk.result), file=sys.stderr)


def _summary(result: GenerationResult) -> str:
    timing = result.timing
    rate = "" if timing.tpot_ms is None else f", then {1000 / timing.tpot_ms:.1f} tokens/s"
    return (
        f"[{result.prompt_tokens} prompt tokens; first token after {timing.ttft_ms:.0f} ms "
        f"(preprocess {timing.preprocess_ms:.0f}, vision {timing.vision_ms:.0f}, prefill "
        f"{timing.prefill_ms:.0f}){rate}; {timing.output_tokens} tokens, {result.finish_reason}]"
    )
