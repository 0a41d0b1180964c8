"""Pure decisions about checkpoints: which ones to keep, and when to save.

A retention policy gets the history's record of each committed checkpoint, and returns the ones to keep. It reads and
deletes no files. Its caller deletes the others, and only after their successor is durable.
"""

from ckpt_core.policies.history import RetentionHistory, numbers_in
from ckpt_core.policies.interval import SaveInterval, SaveSchedule, best_interval
from ckpt_core.policies.retention import (
    AnyOf,
    KeepAtSteps,
    KeepBest,
    KeepEverySteps,
    KeepEveryTime,
    KeepLatest,
    RetentionPolicy,
    SavedCheckpoint,
    to_delete,
)
from ckpt_core.policies.words import RULES_IN_WORDS, policy_of_words, rules_of_words

__all__ = [
    "RULES_IN_WORDS",
    "AnyOf",
    "KeepAtSteps",
    "KeepBest",
    "KeepEverySteps",
    "KeepEveryTime",
    "KeepLatest",
    "RetentionHistory",
    "RetentionPolicy",
    "SaveInterval",
    "SaveSchedule",
    "SavedCheckpoint",
    "best_interval",
    "numbers_in",
    "policy_of_words",
    "rules_of_words",
    "to_delete",
]
