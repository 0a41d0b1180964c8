"""Rehearsal: runs a user's script uninterrupted and resumed in fresh processes, and compares the two step by step.

No list of captured state is complete for arbitrary Python code. ``plan``: what one process of a rehearsal does.
``notes``: what the plugins record of each step. ``comparing``: how two runs differ. ``samples``: whether a different
number of ranks continues an epoch with each sample once. ``running``: starts the processes. ``result``: the report.
"""

from __future__ import annotations

from ckpt_core.options import REHEARSAL_VARIABLE as VARIABLE
from ckpt_core.rehearsal.comparing import SUBJECTS, Difference
from ckpt_core.rehearsal.notes import (
    Notes,
    classes_of,
    defined_at,
    generators_of,
    labelled,
    optimizers_of,
    plain_of,
    script_variables,
    states_of,
)
from ckpt_core.rehearsal.plan import POINTS, Plan
from ckpt_core.rehearsal.result import Result, Resumed
from ckpt_core.rehearsal.running import CannotRehearseError, rehearse

__all__ = [
    "POINTS",
    "SUBJECTS",
    "VARIABLE",
    "CannotRehearseError",
    "Difference",
    "Notes",
    "Plan",
    "Result",
    "Resumed",
    "classes_of",
    "defined_at",
    "generators_of",
    "labelled",
    "optimizers_of",
    "plain_of",
    "rehearse",
    "script_variables",
    "states_of",
]
