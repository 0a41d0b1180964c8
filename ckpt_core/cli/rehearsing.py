"""``ckpt rehearse``: test whether a training script resumes exactly, before a real interruption."""

from __future__ import annotations

import argparse
import shlex
import sys

from ckpt_core.cli.output import fail, print_json, printable
from ckpt_core.cli.parser import Commands, Exit, Options


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    parser = commands.add(
        "rehearse",
        _rehearse,
        help="train with a script, resume it in fresh processes, and say whether that was exact",
        epilog="The script stays as it is; its own checkpoints are left alone.",
        example="-- python train.py --batch-size 8",
        codes="0 every resume was exact, 1 one was not, 2 usage, 3 the script cannot be rehearsed.",
    )
    parser.add_argument("--at", metavar="STEPS", type=_steps, default=(), help="save after these steps, such as 7,20")
    parser.add_argument(
        "--points",
        metavar="NAMES",
        type=_names,
        help="save at these points: middle,epoch-end,accumulation,validation (default: all, unless --at is given)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        help="train this many optimizer steps (default: a little more than two epochs, or 30 if those are longer)",
    )
    parser.add_argument(
        "--resume-with",
        metavar="ARGUMENTS",
        default="",
        help="additional arguments of a resumed run, such as '--resume_from {checkpoint}' (scripts with Accelerate)",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=_steps,
        default=(),
        help="also resume with these numbers of ranks, such as 1,3: is each sample of the epoch used once?",
    )
    parser.add_argument(
        "--ignore",
        metavar="SUBJECT:KEY",
        action="append",
        default=[],
        help="what may differ, such as 'attributes:Model.seen'; may contain * and ?, and be given several times",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep checkpoints, notes and outputs in this directory")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="how long one process may take")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts the training")


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 7,20") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _rehearse(options: Options) -> int:
    from ckpt_core.rehearsal import CannotRehearseError, rehearse

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        said = "give the command that starts the training: -- python train.py"
        return fail(options, said, Exit.USAGE, said_by="ckpt rehearse")
    try:
        result = rehearse(
            command,
            at=options.at,
            points=options.points,
            steps=options.steps,
            resume_arguments=shlex.split(options.resume_with),
            ranks=options.ranks,
            ignore=options.ignore,
            directory=options.keep,
            timeout=options.timeout,
            announce=lambda line: None if options.quiet else print(f"rehearsal: {line}", file=sys.stderr, flush=True),
        )
    except ValueError as error:
        return fail(options, str(error), Exit.USAGE, said_by="ckpt rehearse")
    except CannotRehearseError as error:
        return fail(options, str(error), Exit.MISSING, said_by="ckpt rehearse")
    if options.json:
        print_json(result.as_dict())
    else:
        for line in result.text().splitlines():
            print(printable(line))
    return Exit.OK if result.is_exact else Exit.FAILED
