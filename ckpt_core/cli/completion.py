"""``ckpt completion``: what makes a shell complete the words of the command."""

from __future__ import annotations

import argparse

from ckpt_core.cli.output import print_json
from ckpt_core.cli.parser import Commands, Exit, Options

# Whatever stands behind an option is completed as a file by the shell itself, so that local paths work.
_BASH = """\
_ckpt() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {verbs}) verb=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    local words=""
    case $verb in
        "") if [[ $word == -* ]]; then words="{options}"; else words="{names}"; fi ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _ckpt ckpt
"""
_CASE = '        {verb}) if [[ $word == -* ]]; then words="{options}"; else words="{words}"; fi ;;'


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    completion = commands.add(
        "completion",
        lambda options: _completion(options, commands),
        help="print what makes a shell complete commands, options and paths",
        epilog='bash: add  eval "$(ckpt completion bash)"  to ~/.bashrc\n'
        'zsh:  add  eval "$(ckpt completion zsh)"   to ~/.zshrc, behind compinit',
        example="bash",
    )
    completion.add_argument("shell", choices=("bash", "zsh"))


def _completion(options: Options, commands: Commands) -> int:
    parsers = commands.parsers
    cases = [
        _CASE.format(verb=verb, options=" ".join(_options_of(parser)), words=" ".join(_words_of(parser)))
        for verb, parser in parsers.items()
    ]
    text = _BASH.format(
        verbs="|".join(parsers),
        names=" ".join(parsers),
        options=" ".join(_options_of(commands.parser)),
        cases="\n".join(cases),
    )
    if options.shell == "zsh":
        text = "autoload -U +X bashcompinit && bashcompinit\n" + text
    if options.json:
        print_json({"shell": options.shell, "script": text})
    else:
        print(text, end="")
    return Exit.OK


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    found = (name for action in parser._actions for name in action.option_strings if name.startswith("--"))
    return list(dict.fromkeys(found))


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the words that a command takes in the place of a path."""
    return [str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()]
