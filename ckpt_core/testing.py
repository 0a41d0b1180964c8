"""Assertion for users' test suites: fail a test if a training script does not resume exactly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence

from ckpt_core.rehearsal import Result, rehearse

__all__ = ["assert_resumes_exactly"]


def assert_resumes_exactly(
    training: str | os.PathLike[str] | Sequence[str] | Callable[[], object],
    *,
    at: Sequence[int] = (),
    points: Sequence[str] | None = None,
    steps: int | None = None,
    resume_arguments: Sequence[str] = (),
    ranks: Sequence[int] = (),
    ignore: Collection[str] = (),
    directory: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> Result:
    """Train, resume in fresh processes from several points of the run, and compare step by step.

    This is ``ckpt rehearse`` for test suites: the training must use one of our plugins, and its own checkpoints are not
    touched. Weights, optimizers, schedulers, random generators, batches, losses, logged values and the attributes of
    module, callbacks, data sets and samplers are compared.

    Args:
        training: The file of a script; the words of a command, such as ``[sys.executable, "train.py", "--small"]`` or
            ``["torchrun", ...]``; or a function without arguments at the top of a module that can be imported.
        at: Optimizer steps after which to save.
        points: Other points at which to save: ``"middle"``, ``"epoch-end"``, ``"accumulation"``, ``"validation"``;
            None: all that occur, unless ``at`` is given.
        steps: How many optimizer steps to train; None: ten after the last of ``at``, otherwise a little more than two
            epochs if those are short, otherwise 30.
        resume_arguments: Additional command-line arguments of a resumed run; ``{checkpoint}`` is replaced by the path,
            and ``{ranks}`` by the number of ranks.
        ranks: Different numbers of ranks with which to resume, too; these runs must use each sample of the epoch once.
        ignore: Patterns of ``subject:key`` that may differ, such as ``"attributes:Model.seen"``.
        directory: Where to keep checkpoints, notes and the output of all processes; None: delete them.
        env: Environment variables for the processes, in addition to those of this process.
        cwd: Working directory of the processes.
        timeout: Maximum seconds for each process.

    Returns:
        The result of the comparison.

    Raises:
        AssertionError: A resume was not exact; the message says what differs first, where it is defined, what to do.
        CannotRehearseError: The training fails without being interrupted, or does not use our plugins.
        ValueError: A point or function is invalid.

    Example::

        def test_training_resumes_exactly():
            assert_resumes_exactly("train.py", at=[7])
    """
    environment = dict(env or {})
    if callable(training):
        command = _call_of(training)
        environment.setdefault("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    elif isinstance(training, (str, os.PathLike)):
        command = [sys.executable, os.fspath(training)]
    else:
        command = list(training)
    result = rehearse(
        command,
        at=at,
        points=points,
        steps=steps,
        resume_arguments=resume_arguments,
        ranks=ranks,
        ignore=ignore,
        directory=directory,
        env=environment,
        cwd=cwd,
        timeout=timeout,
    )
    if not result.is_exact:
        raise AssertionError(result.text())
    return result


def _call_of(function: Callable[[], object]) -> list[str]:
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "<lambda>")
    if module == "__main__" or "<" in name:
        raise ValueError(f"{name} cannot be called in another process: define it at the top of a module")
    call = f"import importlib, operator; operator.attrgetter({name!r})(importlib.import_module({module!r}))()"
    return [sys.executable, "-c", call]
