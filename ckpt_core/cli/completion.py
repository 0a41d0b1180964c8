"""``ckpt completion``: print a completion script for bash, zsh or fish."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from ckpt_core.cli.output import print_json
from ckpt_core.cli.parser import Commands, Exit, Options

# Values of options are completed as file names by the shell itself, so that local paths work.
_BASH = """\
_ckpt() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} verb="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            {verbs}) verb=${{COMP_WORDS[i]}}; break ;;
        esac
    done
    case $verb:${{COMP_WORDS[COMP_CWORD - 1]}} in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _ckpt ckpt
"""
_VALUES = '        {places}) words="{values}" ;;'
_CASE = '        {verb}:*) if [[ $word == -* ]]; then words="{options}"; else words="{words}"; fi ;;'


def add_commands(commands: Commands) -> None:
    """Add the verb of this file."""
    completion = commands.add(
        "completion",
        lambda options: _completion(options, commands),
        help="print a completion script for a shell",
        epilog='bash: add  eval "$(ckpt completion bash)"  to ~/.bashrc\n'
        'zsh:  add  eval "$(ckpt completion zsh)"   to ~/.zshrc, behind compinit\n'
        "fish: ckpt completion fish > ~/.config/fish/completions/ckpt.fish",
        example="bash",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))


def _completion(options: Options, commands: Commands) -> int:
    text = _of_fish(commands) if options.shell == "fish" else _of_bash(commands)
    if options.shell == "zsh":
        text = "autoload -U +X bashcompinit && bashcompinit\n" + text
    if options.json:
        print_json({"shell": options.shell, "script": text})
    else:
        print(text, end="")
    return Exit.OK


def _of_bash(commands: Commands) -> str:
    cases = [_CASE.format(verb="", options=" ".join(_names(commands.parser)), words=" ".join(commands.parsers))]
    for verb, parser in commands.parsers.items():
        for action in _options_of(parser):
            if action.choices is not None:
                places = "|".join(f"{verb}:{name}" for name in action.option_strings)
                cases.append(_VALUES.format(places=places, values=" ".join(action.choices)))
        cases.append(_CASE.format(verb=verb, options=" ".join(_names(parser)), words=" ".join(_words_of(parser))))
    return _BASH.format(verbs="|".join(commands.parsers), cases="\n".join(cases))


def _of_fish(commands: Commands) -> str:
    lines = []
    for verb, parser in commands.parsers.items():
        lines.append(["-n", "__fish_use_subcommand", "-f", "-a", verb, "-d", (parser.description or "").rstrip(".")])
        after = ["-n", f"__fish_seen_subcommand_from {verb}"]
        lines += [[*after, "-f", "-a", word] for word in _words_of(parser)]
        lines += [[*after, *_option_of_fish(action)] for action in _options_of(parser)]
    lines += [["-n", "__fish_use_subcommand", *_option_of_fish(action)] for action in _options_of(commands.parser)]
    return "".join(f"complete -c ckpt {shlex.join(line)}\n" for line in lines)


def _option_of_fish(action: argparse.Action) -> Iterator[str]:
    for name in action.option_strings:
        yield from ("-l", name[2:]) if name.startswith("--") else ("-s", name[1:])
    if action.choices is not None:
        yield from ("-x", "-a", " ".join(action.choices))
    elif action.nargs != 0:
        yield "-r"
    yield from ("-d", (action.help or "").replace("%%", "%"))


def _options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return [name for action in _options_of(parser) for name in action.option_strings if name.startswith("--")]


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the fixed choices of a verb's positional arguments."""
    return [str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()]
