"""Runs an unchanged training script, with ``save_state`` and ``load_state`` replaced by ours.

The script runs as if started by Python itself: it is ``__main__`` (its classes can be pickled and its spawned workers
find it), can import its siblings, sees its own ``sys.argv``, imports modules in its own order, and has its usual exit
status and traceback.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType, TracebackType

from accelerate_ckpt.config import FILE_OPTION, VARIABLE_PREFIX, CheckpointConfig, OptionError, nearest

_FRAMEWORK = "accelerate"
_TRAINER = "transformers.trainer"
_OWN_DIRECTORY = os.path.dirname(os.path.abspath(__file__))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script or module as ``python script.py`` and ``python -m module`` would.

    ``arguments`` are by default those of this process. Exits as the script does, or with status 2 if options are wrong.
    """
    parser = _parser()
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = ["--module", *(f"--{option}" for option in _names())]
        name = unknown[0].partition("=")[0]
        parser.error(
            f"{name}: there is no such option{nearest(name, known)} (the script's own options come after its name)"
        )
    try:
        config = CheckpointConfig.from_sources(options_of(given))
    except OptionError as error:
        parser.error(str(error))
    script, *script_arguments = given.script
    if not given.module and not os.path.isfile(script):
        parser.error(f"{script}: there is no such file")
    _run(config, script, script_arguments, is_module=given.module)


def add_options(group: argparse._ActionsContainer, prefix: str = "--") -> None:
    """Add a flag for every option of :class:`CheckpointConfig`, and one for the file."""
    for option in dataclasses.fields(CheckpointConfig):
        default = "" if option.default is None else f" (default: {str(option.default).lower()})"
        summary = option.metadata["help"] + default
        group.add_argument(prefix + option.name, metavar=option.metadata["kind"].metavar, help=summary)
    group.add_argument(prefix + FILE_OPTION, metavar="FILE", help="YAML file that maps options to values")


def options_of(given: argparse.Namespace, prefix: str = "--") -> dict[str, str | None]:
    """Return the values of the flags of :func:`add_options`, by option."""
    return {name: getattr(given, prefix.removeprefix("--") + name) for name in _names()}


def _names() -> list[str]:
    return [*(option.name for option in dataclasses.fields(CheckpointConfig)), FILE_OPTION]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate launch [...] -m accelerate_ckpt",
        usage="%(prog)s [options] (script.py | -m module) [arguments of the script]",
        description="Run a training script that uses Accelerate, with checkpoints that are durable, asynchronous and "
        "exact.",
        epilog=f"Each option can also be given as a variable ({VARIABLE_PREFIX}STRATEGY=async) or in the file; a flag "
        "goes before a variable, a variable before the file.",
        allow_abbrev=False,
    )
    add_options(parser)
    for name in _names():
        if "_" in name:  # as Accelerate does, take hyphens too
            parser.add_argument(f"--{name.replace('_', '-')}", dest=name, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    # Everything from the script's name on is the script's, options and "--" included.
    parser.add_argument("script", nargs=argparse.PARSER, help="the training script, and its arguments")
    return parser


def _run(config: CheckpointConfig, script: str, arguments: Sequence[str], *, is_module: bool) -> None:
    actions: dict[str, Callable[[ModuleType], None]] = {
        _FRAMEWORK: lambda _: _install(config),
        _TRAINER: _tell_of_trainers,
    }
    for name in actions.keys() & sys.modules.keys():
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(actions))
    failed = True
    try:
        if is_module:
            main_module, code = _load_module(script)
        else:
            main_module, code = _load_file(script)
        sys.argv[:] = [script if not is_module else code.co_filename, *arguments]
        # Not restored: threads, atexit functions and spawned workers look up the script's names until the very end.
        sys.modules["__main__"] = main_module
        exec(code, main_module.__dict__)  # noqa: S102  running the script is the purpose
        failed = False
    except SystemExit as end:
        failed = end.code not in (None, 0)
        raise
    except BaseException:
        _show_the_scripts_frames_only()
        raise
    finally:
        _drain(failed)


def _new_main(**names: object) -> ModuleType:
    module = ModuleType("__main__")
    # as in the interpreter's own __main__, which up to Python 3.13 has annotations even if the script has none
    if "__annotations__" in vars(sys.modules["__main__"]):
        module.__dict__.update(__annotations__={})
    module.__dict__.update(names, __builtins__=builtins)
    return module


def _load_file(path: str) -> tuple[ModuleType, CodeType]:
    absolute = os.path.abspath(path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    code = loader.source_to_code(loader.get_data(absolute), absolute)
    return _new_main(__file__=absolute, __cached__=None, __loader__=loader), code


def _load_module(name: str) -> tuple[ModuleType, CodeType]:
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
    code = None
    if spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: there is no module {name!r} that can be run")
    main_module = _new_main(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __spec__=spec,
        __package__=spec.parent,
    )
    return main_module, code


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None  # the module or a parent package is missing, not a module that a parent package imports
        raise


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls functions for named modules as soon as the script has imported them, and not earlier.

    Importing Accelerate before the script would be simpler, but wrong: libraries read variables such as ``HF_HOME`` or
    ``OMP_NUM_THREADS`` when they are imported, and values that the script sets before that must take effect.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        action = self._actions.get(name)
        if action is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                action(module)

            # In the loader instead of at once: many libraries call find_spec for Accelerate without importing it.
            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install(config: CheckpointConfig) -> None:
    from accelerate_ckpt._attach import install
    from accelerate_ckpt._termination import finish_before_exit

    install(config)
    finish_before_exit()


def _tell_of_trainers(module: ModuleType) -> None:
    from accelerate_ckpt.integrations.stock_trainer import tell_of_trainers

    tell_of_trainers(module)


def _drain(failed: bool) -> None:
    if "accelerate_ckpt._attach" in sys.modules:  # otherwise the script has not even imported Accelerate
        from accelerate_ckpt._attach import drain

        drain(raised=failed)


def _show_the_scripts_frames_only() -> None:
    """Show tracebacks without the frames of this launcher: from the script on, or none for its syntax errors."""
    show = sys.excepthook

    def show_from_script(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_from_script


def _is_machinery(filename: str) -> bool:
    return filename.startswith("<frozen ") or filename == runpy.__file__ or os.path.dirname(filename) == _OWN_DIRECTORY
