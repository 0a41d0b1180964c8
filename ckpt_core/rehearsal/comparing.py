"""In what two runs differ, by their notes: for each subject the first step, and the keys."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

#: What is compared, in the order in which a step comes by it, as people call it.
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
#: What may be other in any two processes, such as times, where nothing is wrong.
TOLD = ("logged", "callbacks", "attributes", "data sets", "objects")
#: What a difference at the same step may come from.
EXPLAIN = ("callbacks", "attributes", "data sets", "objects")
#: What explains a difference without being one.
HINTS = "variables"
_ABSENT = "absent"

Steps = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """What of one subject differs, at the first step at which something does.

    Attributes:
        subject: One of the names in ``SUBJECTS``.
        rank: The rank that has noted it.
        number: Of the step, as the notes count.
        place: The step for people.
        keys: For each key that differs there, what the uninterrupted run had and what the resumed one has.
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
    """Return the first difference of each subject, the earliest first, of the steps of two runs, by number.

    ``after`` is the number of the last step before the save, ``rank`` whose notes these are. ``ignore`` has patterns of
    ``subject:key`` that are not compared, ``but`` such themselves, and ``already`` what the first step may have from
    before the save.
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
    """Return variables of the script that differ at a step and that training changes; numbers before everything else.

    That they differ is no difference by itself: a script that resumes has other arguments.
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
    """Return where a step is, for people."""
    position = dict(step.get("position", {}))
    shown = f"step {position.pop('step', '?')}"
    others: Sequence[str] = [f"{name} {value}" for name, value in position.items()]
    return f"{shown} ({', '.join(others)})" if others else shown
