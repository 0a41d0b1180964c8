"""Argument parser of the ``ckpt`` command: options of all verbs, exit codes, suggestions for typing errors.

A module of verbs has one function, ``add_commands(commands)``, which calls :meth:`Commands.add` for each verb, and is
listed in :mod:`ckpt_core.cli.command`. Modules that import torch, numpy or stamina are imported inside the functions
that run, so that the help does not wait for them.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import importlib.metadata
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt_core.cli.output import print_json_error

if TYPE_CHECKING:
    from argparse import _SubParsersAction

Options = argparse.Namespace
STORE_OPTIONS = "--endpoint-url, --profile, --storage-options; or AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID"
FORMATS = {"file": 1, "directory": 3}  # format versions that this package writes; a test checks them
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_UNKNOWN_CHOICE = re.compile(r"argument (.+): invalid choice: '([^']*)' \(choose from (.*)\)")
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: .*?(--[a-z-]+)")
_OPTION = re.compile(r"--[a-z][a-z-]+")


class Exit(enum.IntEnum):
    """Exit codes of the command."""

    OK = 0  # success
    FAILED = 1  # a checkpoint is damaged, two differ, or the work could not be done
    USAGE = 2  # the arguments are invalid
    MISSING = 3  # there is nothing at the path
    FOREIGN = 4  # the file or directory is not a checkpoint that can be verified
    INTERRUPTED = 130  # Ctrl-C, by the convention of shells
    CLOSED_PIPE = 141  # the reader of the output has ended (| head), by the convention of shells


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests similar words for unknown verbs, choices and options."""

    verbs: Mapping[str, _Parser] = {}
    words: Sequence[str] = ()  # all arguments of the command
    prints_json = False

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN_CHOICE.search(message)
        if unknown is not None:
            said = f"there is no command {unknown[2]!r}" if unknown[1] == "COMMAND" else message
            message = said + _suggestion(unknown[2], re.findall(r"[\w-]+", unknown[3]))
            if unknown[1] == "COMMAND" and (verbs := [word for word in _Parser.words if word in self.verbs]):
                message = f"{said}: the command comes before its paths: ckpt {verbs[0]} {unknown[2]}"
        parser = next((self.verbs[word] for word in _Parser.words if word in self.verbs), self)  # of the intended verb
        option = _UNKNOWN_OPTION.search(message)
        if option is not None:
            message += _suggestion(option[1], set(_OPTION.findall(parser.format_help())))
        parser.print_usage(sys.stderr)
        if _Parser.prints_json:
            print_json_error(message, Exit.USAGE)
        self.exit(Exit.USAGE, f"{parser.prog}: {message}\n")


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        formats = ", ".join(f"{name} {version}" for name, version in FORMATS.items())
        print(f"ckpt {importlib.metadata.version('ckpt-plugins')} (formats: {formats})")
        parser.exit()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Breaks lines of a description only where they are too long for the terminal, and between words."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (textwrap.wrap(line, width, subsequent_indent="  ") or [""] for line in text.splitlines())
        return "\n".join(part for line in lines for part in line)


class Commands:
    """The verbs of the command."""

    def __init__(self, parser: _Parser) -> None:
        self.parser = parser
        self._parsers: _SubParsersAction[_Parser] = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)

    @property
    def parsers(self) -> dict[str, _Parser]:
        """The parsers of the verbs by name, in the order of the help."""
        return dict(self._parsers.choices)

    def add(
        self,
        name: str,
        run: Callable[[Options], int],
        *,
        help: str,
        example: str,
        epilog: str = "",
        codes: str = "0 success, 1 failure, 2 usage.",
    ) -> argparse.ArgumentParser:
        """Add a verb that calls ``run`` with the options, and return its parser.

        ``run`` returns the exit code, and may raise a ``CheckpointError``. ``help`` describes the verb in one line,
        ``example`` shows arguments that follow it, ``codes`` explains the exit codes.
        """
        parser = self._parsers.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=f"{epilog}\n\n".lstrip() + f"Example: ckpt {name} {example}\nExit codes: {codes}",
            parents=[_common()],
            formatter_class=_Help,
        )
        parser.set_defaults(run=run, verb=name)
        return parser


def parse(arguments: Sequence[str] | None, add_commands: Sequence[Callable[[Commands], None]]) -> Options | None:
    """Parse the arguments and return the options; print the help and return None if there is no verb.

    ``add_commands`` are the functions of the modules of verbs, in the order of the help.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    _Parser.words = words
    _Parser.prints_json = "--json" in itertools.takewhile(lambda word: word != "--", words)
    parser = _Parser(
        prog="ckpt",
        description="List, inspect, verify, convert and move checkpoints.",
        epilog="ckpt COMMAND --help says more. Exit codes: 0 success, 1 failure, 2 usage.",
        parents=[_common()],
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of the package and its formats")
    commands = Commands(parser)
    for add in add_commands:
        add(commands)
    parser.verbs = commands.parsers
    # Defaults are set here, because defaults in a verb's parser would override options given before the verb.
    defaults = Options(json=False, quiet=False, storage_options=None, endpoint_url=None, profile=None, run=None)
    options = parser.parse_args(words, defaults)
    if options.run is None:
        parser.print_help()
        return None
    _refuse_empty_paths(options, commands.parsers[options.verb])
    options.storage_options = _storage_options(options)
    return options


def _refuse_empty_paths(options: Options, parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.option_strings or action.nargs == argparse.REMAINDER:
            continue
        given = getattr(options, action.dest)
        if any(path in ("", "file://", "local://") for path in (given if isinstance(given, list) else [given])):
            parser.error(f"{action.metavar or action.dest} is empty: is a variable of the shell not set?")


def _common() -> _Parser:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group("everywhere")
    group.add_argument("--json", action="store_true", help="print one JSON document")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
    group.add_argument("--endpoint-url", metavar="URL", help="endpoint of an object store (or AWS_ENDPOINT_URL)")
    group.add_argument("--profile", metavar="NAME", help="profile of the credentials (or AWS_PROFILE)")
    group.add_argument(
        "--storage-options", type=json_object, metavar="JSON", help="passed to fsspec for URLs; not for secrets"
    )
    return parser


def _storage_options(options: Options) -> dict[str, Any] | None:
    given = {"endpoint_url": options.endpoint_url, "profile": options.profile}
    merged = {**(options.storage_options or {}), **{name: value for name, value in given.items() if value is not None}}
    return merged or None


def json_object(text: str) -> dict[str, Any]:
    """Parse the value of an option as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def nbytes(text: str) -> int:
    """Parse the value of an option as a size, such as ``5GB``, and return it in bytes."""
    found = re.fullmatch(r"([0-9]+) *([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _UNITS or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 500MB or 5GB")
    return int(found[1]) * _UNITS[found[2].upper()]
