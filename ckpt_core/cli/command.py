"""Run the ``ckpt`` command: its list of verbs, the encoding of its output, and the handling of its errors."""

from __future__ import annotations

import codecs
import logging
import os
import sys
from collections.abc import Sequence

from ckpt_core.cli import (
    comparing,
    completion,
    converting,
    disk_usage,
    doctor,
    inspecting,
    latest,
    listing,
    moving,
    rehearsing,
    report,
    tidying,
    verifying,
)
from ckpt_core.cli.output import fail, printable
from ckpt_core.cli.parser import STORE_OPTIONS, Exit, parse
from ckpt_core.errors import CheckpointError, StorageError

# In the order of the help.
_VERBS = (
    listing.add_commands,
    latest.add_commands,
    inspecting.add_commands,
    verifying.add_commands,
    comparing.add_commands,
    converting.add_commands,
    report.add_commands,
    rehearsing.add_commands,
    moving.add_commands,
    disk_usage.add_commands,
    tidying.add_commands,
    doctor.add_commands,
    completion.add_commands,
)


def run(arguments: Sequence[str] | None) -> int:
    """Run the command with the arguments after ``ckpt`` (by default, this process's); return its :class:`Exit` code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:  # closed by the parent process; a checkpoint must not get this descriptor
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # gcsfs logs tracebacks of the exceptions that it raises
    if hasattr(sys.stdout, "reconfigure"):
        codecs.register_error("ckpt-names", _bytes_of_a_name)
        sys.stdout.reconfigure(errors="ckpt-names")
    try:
        try:
            code = _run(arguments)
        finally:
            sys.stdout.flush()  # also after SystemExit of --help
    except OSError as error:
        # The reader of the output has closed the pipe, or the disk that receives the output is full.
        is_closed = isinstance(error, BrokenPipeError)
        if not is_closed:
            print(f"ckpt: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # otherwise the interpreter would fail again when it flushes stdout on exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.CLOSED_PIPE if is_closed else Exit.FAILED
    return int(code)


def _run(arguments: Sequence[str] | None) -> int:
    options = parse(arguments, _VERBS)
    if options is None:
        return Exit.OK
    is_remote = any("://" in str(value) for value in vars(options).values())
    if is_remote and sys.stderr.isatty() and not options.quiet:
        _say_what_is_waited_for()
    try:
        return int(options.run(options))
    except CheckpointError as error:
        code = fail(options, error, Exit.FAILED)
        if isinstance(error, StorageError) and "://" in (error.path or ""):
            print(f"  for a store: {STORE_OPTIONS}", file=sys.stderr)
        return code
    except OSError as error:
        if not (error.filename and error.strerror):
            raise  # an error of the output itself
        return fail(options, f"{error.filename}: {error.strerror}", Exit.FAILED)


def _say_what_is_waited_for() -> None:
    from ckpt_core.storage.retry import Retries

    said: set[str] = set()

    def say(url: str) -> None:
        bucket = "/".join(url.split("/")[:3])
        if bucket not in said:
            said.add(bucket)
            print(f"ckpt: waiting for {printable(bucket)} to answer", file=sys.stderr)

    Retries.on_silence = staticmethod(say)


def _bytes_of_a_name(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler: encode what the output's encoding cannot express as in names of files, or else escape it."""
    if isinstance(error, UnicodeEncodeError):
        try:
            return os.fsencode(error.object[error.start : error.end]), error.end
        except UnicodeEncodeError:
            pass
    return codecs.backslashreplace_errors(error)
