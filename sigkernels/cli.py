"""The ``sigkernels`` command.

A command is a module with ``add_parser(subparsers)`` and ``run(args) -> exit code``. Exit codes: 0 done,
2 bad input (one line says which), 130 interrupted; a command may give others a meaning of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO, cast

from . import __version__
from .backends import BackendError

COMMANDS = {
    "env": "sigkernels.env",
    "demo": "sigkernels.demo.command",
    "verify": "sigkernels.verify.command",
    "check": "sigkernels.verify.check_command",
    "explore": "sigkernels.verify.explore_command",
    "bench": "sigkernels.bench_command",
}
BAD_INPUT = 2
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser, and so those of its commands, that refuses arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def add_command(
    subparsers: argparse._SubParsersAction[Any],
    name: str,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    """The parser of one command, with the ``--json`` that every command has."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, description=description)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. The modules it imports are light: work is imported when it is run."""
    parser = Parser(
        prog="sigkernels",
        description="Multi-label output layers: fused losses, heads that can predict every label set, and proofs.",
    )
    parser.add_argument("--version", action="version", version=f"sigkernels {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for module in COMMANDS.values():
        importlib.import_module(module).add_parser(subparsers)
    return parser


class _Output:
    """stdout, of which the reader, `head` say, may have seen enough: the command goes on and has its own exit code."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._discard()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        """What is still to come, and what the stream holds back, goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. ``SIGKERNELS_DEBUG=1`` shows the traceback of a refused input."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:  # said with the command, whose help lists what there is
        Parser(prog=f"sigkernels {args.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with contextlib.redirect_stdout(cast(TextIO, _Output(sys.stdout or io.StringIO()))) as output:
            code: int = importlib.import_module(COMMANDS[args.command]).run(args)
            output.flush()  # a full disk is an error of this command, not of the interpreter on its way out
        return code
    except KeyboardInterrupt:
        print(f"sigkernels {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, BackendError) as error:
        if os.environ.get("SIGKERNELS_DEBUG"):
            raise
        message = " ".join(str(error).split())
        print(f"sigkernels {args.command}: error: {message}", file=sys.stderr)
        return BAD_INPUT
