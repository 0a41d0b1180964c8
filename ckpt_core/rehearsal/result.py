"""The result of a rehearsal, and its report: a table, what differs, where that is defined and what to do."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_core.rehearsal.comparing import EXPLAIN, SUBJECTS, Difference

_SHOWN = 4

_EACH_PROCESS = (
    "A second resume from the same checkpoint differs here, too: it is something that differs in each process. "
    "What to do: set a seed before anything is drawn (seed_everything, set_seed). Look there also for time, "
    "os.urandom, secrets, uuid, hash() or a generator without a seed, and draw from torch, numpy or random, whose "
    "generators are restored; kernels that are not deterministic need torch.use_deterministic_algorithms(True)."
)
_LOST = {
    "position": "The script or the loader has lost its place. What to do: let the loader be prepared or returned "
    "from train_dataloader, give an iterable dataset state_dict and load_state_dict, and do not skip "
    "batches twice.",
    "generators": "Something draws random numbers in the first run or in the resumed run only. What to do: draw "
    "from a torch.Generator of your own that is an attribute of the dataset, sampler or module.",
    "data": "The code that makes the batches has state that no checkpoint holds: a counter, a list, a generator, "
    "a variable of the script. What to do: give the dataset or the sampler state_dict and "
    "load_state_dict.",
    "modes": "What to do: set it in __init__, or in a hook that runs at every start.",
    "loss": "The model or the code around it has state that no checkpoint holds. What to do: register a buffer, "
    "or save it with on_save_checkpoint (Lightning) or register_for_checkpointing (Accelerate).",
    "weights": "Something other than the optimizer changes weights or buffers, or the state that it depends on "
    "is not saved. What to do: do it before the save, in training_step or a callback with state_dict.",
    "optimizers": "What to do: return the optimizer from configure_optimizers (Lightning) or prepare it "
    "(Accelerate), and use a scheduler for settings that change.",
    "schedulers": "What to do: return the scheduler from configure_optimizers (Lightning) or prepare it (Accelerate).",
    "logged": "A metric or a running value is not in the checkpoint. What to do: make it a torchmetrics.Metric that "
    "is an attribute of the module, or save it.",
    "callbacks": "What to do: let load_state_dict restore what state_dict returns.",
    "objects": "What to do: return it from state_dict and load it in load_state_dict.",
    "data sets": "What to do: give it state_dict and load_state_dict; if nothing depends on it, --ignore it.",
    "attributes": "What to do: register a buffer or override on_save_checkpoint (module), give it state_dict "
    "(callback); if nothing depends on it, --ignore it.",
}


@dataclasses.dataclass(frozen=True)
class Resumed:
    """One resume, compared with the uninterrupted run.

    Attributes:
        point: The point at which the checkpoint was saved: ``"middle"``, ``"epoch-end"``, ...
        place: A text that describes the step before the save.
        steps: How many steps were compared.
        differences: The first of each subject, the earliest first; empty if the resume was exact.
        hints: Variables of the script that differ at the first difference.
        where: By subject, the classes and functions that it depends on, with file and line.
        said: Warnings of the resumed run itself.
        failure: The end of its output, if it has failed.
        ranks: How many ranks resumed, if not as many as had saved; then only the samples are compared.
        samples: How the resumed ranks handed out the samples of the epoch, as a cell of the table.
        problem: What is wrong with that, such as samples that were lost; None if nothing is.
    """

    point: str
    place: str
    steps: int
    differences: tuple[Difference, ...] = ()
    hints: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    where: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    said: tuple[str, ...] = ()
    failure: str | None = None
    ranks: int | None = None
    samples: str = "-"
    problem: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it ended with all steps equal; with a different number of ranks, whether each sample came once."""
        return not self.differences and self.failure is None and self.problem is None


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a rehearsal.

    Attributes:
        command: The command that was run.
        steps: Number of steps of the uninterrupted run.
        subjects: The subjects that were compared.
        resumes: The resumes.
        missed: Points that did not occur.
        repeats: ``subject:key`` in which two resumes from the same checkpoint differ; None if this was not tested.
    """

    command: Sequence[str]
    steps: int
    subjects: tuple[str, ...]
    resumes: tuple[Resumed, ...]
    missed: tuple[str, ...] = ()
    repeats: frozenset[str] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether every resume was exact."""
        return all(resumed.is_exact for resumed in self.resumes)

    def text(self) -> str:
        """Return the report: the table, and below it what differs, where it is defined and what to do."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        times = "1 resume" if len(self.resumes) == 1 else f"{len(self.resumes)} resumes"
        yield f"{times} of `{shlex.join(self.command)}`, compared with {self.steps} steps that were not interrupted"
        yield ""
        others = sorted({resumed.ranks for resumed in self.resumes if resumed.ranks})
        yield from _table(
            [
                ["saved after", *(resumed.place.partition(" (")[0] for resumed in self.resumes)],
                ["", *(resumed.point for resumed in self.resumes)],
                *(
                    [["resumed by ranks", *(str(resumed.ranks or "as many") for resumed in self.resumes)]]
                    if others
                    else []
                ),
                *([["samples of the epoch", *(resumed.samples for resumed in self.resumes)]] if others else []),
                ["repeated steps", *(str(resumed.steps) for resumed in self.resumes)],
                *([SUBJECTS[subject], *(_cell(r, subject) for r in self.resumes)] for subject in self.subjects),
            ]
        )
        for resumed in self.resumes:
            if not resumed.is_exact:
                yield ""
                yield from self._details(resumed)
        if self.missed:
            yield ""
            yield f"did not occur in these steps: {', '.join(self.missed)} (--steps trains longer)"
        if self.is_exact:
            yield ""
            yield "exact: every resumed run was equal, bit for bit"
            if others:
                yield f"with {', '.join(map(str, others))} ranks: each sample of the epoch was handed out once"

    def _details(self, resumed: Resumed) -> Iterator[str]:
        yield f"saved after {resumed.place} [{resumed.point}]: NOT EXACT"
        for message in resumed.said:
            yield f"  the resumed run said: {message}"
        if resumed.failure is not None:
            yield "  the resumed run failed:"
            yield from (f"    {line}" for line in resumed.failure.splitlines())
        if resumed.problem is not None:
            yield f"  resumed by {resumed.ranks} ranks: {resumed.problem}"
        if not resumed.differences:
            return
        first = resumed.differences[0].number
        at_first = [difference for difference in resumed.differences if difference.number == first]
        causes = [at_first[0], *(d for d in at_first[1:] if d.subject in EXPLAIN)]
        yield f"  first difference: {causes[0].place}"
        for difference in causes:
            yield from self._cause(resumed, difference)
        others = [d for d in resumed.differences if d not in causes]
        if others:
            yield "  after that: " + ", ".join(f"{SUBJECTS[d.subject]} ({d.place.partition(' (')[0]})" for d in others)

    def _cause(self, resumed: Resumed, difference: Difference) -> Iterator[str]:
        rank = f" of rank {difference.rank}" if difference.rank else ""
        yield f"  {SUBJECTS[difference.subject]}{rank}:"
        yield from (f"    {line}" for line in _pairs(difference.keys))
        places = _places(resumed.where.get(difference.subject, ()), difference)
        if places:
            yield f"    defined in: {', '.join(places)}"
        if difference is resumed.differences[0] and resumed.hints:
            yield "    variables of the script that differ there:"
            yield from (f"      {line}" for line in _pairs(resumed.hints))
        names = {f"{difference.subject}:{key}" for key in difference.keys}
        repeats = self.repeats is not None and bool(names & self.repeats)
        yield f"    {_EACH_PROCESS if repeats else _LOST.get(difference.subject, _LOST['loss'])}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        return {"exact": self.is_exact, **dataclasses.asdict(self), "repeats": sorted(self.repeats or ())}


def _cell(resumed: Resumed, subject: str) -> str:
    found = [difference for difference in resumed.differences if difference.subject == subject]
    if found:
        return f"DIFFERS, {found[0].place.partition(' (')[0]}"
    return "same" if resumed.steps else "-"


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _pairs(pairs: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for key, (expected, found) in list(pairs.items())[:_SHOWN]:
        yield f"{key}: {found} instead of {expected}"
    if len(pairs) > _SHOWN:
        yield f"and {len(pairs) - _SHOWN} more"


def _places(places: Sequence[str], difference: Difference) -> list[str]:
    owners = {key.partition(".")[0] for key in difference.keys}
    of_owners = [place for place in places if place.partition(" ")[0].rpartition(".")[2] in owners]
    return of_owners or list(places)[:_SHOWN]
