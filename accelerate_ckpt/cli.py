"""The command ``accelerate-ckpt``: ``accelerate launch`` with our flags in addition to its own."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate_ckpt._private.command_line import launch, launch_parser
from accelerate_ckpt.config import CheckpointConfig, OptionError
from accelerate_ckpt.launcher import add_options, options_of

_TITLE = "Checkpoint Arguments"
_PREFIX = "--ckpt_"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what ``accelerate launch [flags] -m accelerate_ckpt [options] train.py`` does, with one parser for all flags.

    ``arguments`` are by default those of this process. A wrong flag ends the process with status 2.
    """
    parser = launch_parser(_TITLE)
    parser.prog = "accelerate-ckpt"
    parser.description = (
        "Launch a training script as 'accelerate launch' does, with durable checkpoints; the script stays unchanged."
    )
    add_options(parser.add_argument_group(_TITLE, "How accelerator.save_state saves."), _PREFIX)
    given = parser.parse_args(arguments)
    if given.no_python:
        parser.error("--no_python: the script must be run by Python for its checkpoints to be replaced")
    options = options_of(given, _PREFIX)
    try:  # once here, rather than in every process
        CheckpointConfig.from_sources(options, flag_name=_PREFIX + "{}")
    except OptionError as error:
        parser.error(str(error))
    flags = [f"--{name}={value}" for name, value in options.items() if value is not None]
    module = ["-m"] if given.module else []
    given.training_script_args = [*flags, *module, given.training_script, *given.training_script_args]
    given.training_script, given.module = "accelerate_ckpt", True
    launch(given)
