"""Compare the notes of two runs: for each subject, find the first step at which they differ, and the keys."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

#: The subjects that are compared, in the order in which a step uses them, with their names in the report.
SUBJECTS = {
    "position": "place in the data",
    "generators": "random generators",
    "data": "batches",
    "modes": "train/eval, requires_grad",
    "loss": "loss",
    "gradients": "gradients",
    "weights": "weights and buffers",
    "optimizers": "optimizers",
    "schedulers": "schedulers",
    "logged": "logged values",
    "callbacks": "callbacks' state",
    "objects": "registered objects",
    "data sets": "attributes of datasets",
    "attributes": "attributes",
}
#: Subjects that may hold values which differ in any two processes, such as times, although nothing is wrong.
TOLD = ("logged", "callbacks", "attributes", "data sets", "objects")
#: Subjects that may be the cause of another subject's difference at the same step.
EXPLAIN = ("callbacks", "attributes", "data sets", "objects")
#: The subject whose differences are no findings, but may explain one.
HINTS = "variables"
_ABSENT = "absent"

Steps = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """The keys of one subject that differ, at the first step with a difference.

    Attributes:
        subject: One of the names in ``SUBJECTS``.
        rank: The rank whose notes these are.
        number: The number of the step, as the notes count.
        place: A text that describes the step.
        keys: For each key that differs there, the value of the uninterrupted run and that of the resumed run.
    """

    subject: str
    rank: int
    number: int
    place: str
    keys: Mapping[str, tuple[str, str]]


def compare(
    expected: Steps,
    found: Steps,
    *,
    after: int,
    rank: int = 0,
    ignore: Collection[str] = (),
    but: Collection[str] = (),
    already: Collection[str] = (),
) -> list[Difference]:
    """Return the first difference of each subject between the steps of two runs, the earliest first.

    ``after`` is the number of the last step before the save, ``rank`` the rank whose notes these are. Not compared are
    ``subject:key`` that match a pattern in ``ignore`` or are in ``but``. Those in ``already`` may be absent in the
    resumed run's first step, because the uninterrupted run has them from before the save.
    """
    numbers = sorted(int(number) for number in expected if int(number) > after)
    differences: dict[str, Difference] = {}
    for number in numbers:
        mine, theirs = found.get(str(number)), expected[str(number)]
        place = place_of(theirs)
        if mine is None:
            differences.setdefault(
                "position", Difference("position", rank, number, place, {"step": (place, "never reached")})
            )
            break
        for subject in [*theirs, *(other for other in mine if other not in theirs)]:
            if subject in differences or subject == HINTS:
                continue
            keys = _differing(theirs.get(subject, {}), mine.get(subject, {}))
            if number == numbers[0]:
                keys = {k: pair for k, pair in keys.items() if pair[1] != _ABSENT or f"{subject}:{k}" not in already}
            keys = {key: pair for key, pair in keys.items() if not _is_ignored(f"{subject}:{key}", ignore, but)}
            if keys:
                differences[subject] = Difference(subject, rank, number, place, keys)
    order = list(SUBJECTS)
    return sorted(differences.values(), key=lambda d: (d.number, order.index(d.subject)))


def hints(expected: Steps, found: Steps, number: int) -> dict[str, tuple[str, str]]:
    """Return the script's variables that differ at a step and that training changes; plain values before digests.

    They are no differences by themselves, because a script that resumes has different arguments.
    """
    theirs, mine = expected.get(str(number), {}).get(HINTS, {}), found.get(str(number), {}).get(HINTS, {})
    changing = {
        key for step in expected.values() for key, value in step.get(HINTS, {}).items() if value != theirs.get(key)
    }
    pairs = {key: pair for key, pair in _differing(theirs, mine).items() if key in changing and _ABSENT not in pair}
    return dict(sorted(pairs.items(), key=lambda item: "#" in item[1][0]))


def _differing(expected: Mapping[str, str], found: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {key: (expected.get(key, _ABSENT), found.get(key, _ABSENT)) for key in [*expected, *found]}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _is_ignored(name: str, patterns: Collection[str], names: Collection[str]) -> bool:
    return name in names or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def place_of(step: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a text that describes a step."""
    position = dict(step.get("position", {}))
    shown = f"step {position.pop('step', '?')}"
    others: Sequence[str] = [f"{name} {value}" for name, value in position.items()]
    return f"{shown} ({', '.join(others)})" if others else shown
