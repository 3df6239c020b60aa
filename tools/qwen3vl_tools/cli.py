"""The `qwen3vl-export` command line: parsing and exit codes only.

Results go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 a mistake that a sentence
explains, 2 wrong usage, 130 interrupted; a bug shows its traceback. Heavy imports happen inside a
subcommand, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from qwen3vl_export import __version__
from qwen3vl_export.errors import Qwen3VLError
from qwen3vl_tools.commands import demo, export, inspect, run

__all__ = ["main"]

_COMMANDS = (export, run, inspect, demo)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    args = _make_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    _stop_on_signals()
    try:
        code = int(args.run(args))
        print(end="", flush=True)  # a full disk is a failure of the command, not of its exit
        return code
    except Qwen3VLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()  # the reader (head, less) has gone
        return 1
    except OSError as error:
        if not _output_fails():
            raise
        _drop_output()
        print(f"error: writing the answer failed: {error.strerror or error}", file=sys.stderr)
        return 1


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen3vl-export",
        description="Export Qwen3-VL checkpoints to ONNX, run them, and prove the answers equal.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def _stop_on_signals() -> None:
    """Treat the end of the terminal session and a termination like Ctrl-C."""
    for name in ("SIGTERM", "SIGHUP"):
        signum = getattr(signal, name, None)  # Windows has no SIGHUP
        # nohup ignores SIGHUP on purpose.
        if signum is not None and signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _stop)


def _output_fails() -> bool:
    """Whether stdout is at fault: it then still holds what it could not write."""
    try:
        print(end="", flush=True)
    except OSError:
        return True
    return False


def _drop_output() -> None:
    """Redirect stdout, which spares Python's own complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Turn a termination into an exception, so that half-written output is removed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
