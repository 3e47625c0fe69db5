"""`subcaps`: parses, and calls one function.

A command is a parser with `set_defaults(call=...)`. What it calls imports torch, so it is imported only then.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from subcaps import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.call(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if "traceback" in arguments:
            traceback.print_exc()
        else:
            message = str(error) or type(error).__name__
            print(f"subcaps: {message} (--traceback shows where)", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="subcaps", description="Subspace capsules for PyTorch.")
    parser.add_argument("--version", action="version", version=f"subcaps {__version__}")
    commands = _group(parser, "COMMAND")

    bench = commands.add_parser("bench", help="time it, side by side with what else one would use")
    benches = _group(bench, "BENCH")
    _add_bench(benches, "polar", "the projection W -> Q, forward and backward", "; a figure goes beside it")
    _add_bench(benches, "layers", "activations, training steps, memory and fused networks, beside their CNN twins", "")
    return parser


def _add_bench(benches: Any, name: str, text: str, beside: str) -> None:
    bench = benches.add_parser(name, help=text, description=text)
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default: cpu)")
    bench.add_argument("--out", metavar="FILE", help=f"the JSON (default: results/bench/{name}-DEVICE.json){beside}")
    bench.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs; writes nothing without --out")
    bench.set_defaults(call=_bench, bench=name)


def _bench(arguments: argparse.Namespace) -> None:
    from subcaps.bench import layers, polar

    run = {"polar": polar.run, "layers": layers.run}[arguments.bench]
    run(arguments.device, arguments.out, arguments.quick)


def _group(parser: argparse.ArgumentParser, metavar: str) -> Any:
    """Where commands are added. Without one, the help is shown."""
    parser.set_defaults(call=lambda arguments: parser.print_help())
    return parser.add_subparsers(metavar=metavar, title=f"{metavar.lower()}s")


class _Parser(argparse.ArgumentParser):
    """Every command's. A mistyped command or flag is answered with the nearest one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # absent rather than False: a command's own default would undo what stands before the command
        self.add_argument("--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = re.findall(r"--[a-z-]+", self.format_help())
            self.error(f"unknown {' '.join(unknown)}{_nearest(unknown[0].split('=')[0], flags)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"argument [A-Z]+: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            commands = re.findall(r"[\w-]+", choice[2])
            message = f"unknown command {choice[1]!r}{_nearest(choice[1], commands)}; there is {', '.join(commands)}"
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` says what there is\n")


def _nearest(word: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {match[0]}?" if match else ""


if __name__ == "__main__":
    sys.exit(main())
