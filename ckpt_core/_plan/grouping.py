"""Which tensors of a part go into files of their own, because they stay as they are from save to save."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping

__all__ = ["Grouping"]

# A file costs a call or two to make durable, and its share of the manifest.
WORTH_A_FILE = 256 * 1024
# Files of unchanged tensors of one part; with more, they become one.
MOST_GROUPS = 4
# A tensor that changed so often while it was taken for unchanged must stay as it is for 2 to that power saves.
MOST_DOUBLINGS = 6


class Grouping:
    """Divides the tensors of one part into those that change (group 0) and groups of those that do not.

    A group is written once and linked from then on, as long as nothing in it changes and nothing joins it. So a tensor
    that changes leaves its group, and tensors that are found to be unchanged make a new one. One that comes and goes
    has to stay as it is for longer each time before it is taken for unchanged again: it would take the others' file
    with it.
    """

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._quiet: collections.Counter[str] = collections.Counter()
        self._returned: collections.Counter[str] = collections.Counter()

    def restore(self, groups: Mapping[str, int]) -> None:
        """Begin with the groups of a checkpoint."""
        self._groups = {key: group for key, group in groups.items() if group}

    def update(self, sizes: Mapping[str, int], unchanged: Collection[str]) -> Mapping[str, int]:
        """Return the group of each tensor that is in one, for the next save.

        Args:
            sizes: Bytes of every tensor that is going to be saved.
            unchanged: Those that seem to be as they were in the save before. All of them, or none, say nothing: the
                state was saved twice, or nothing is known.
        """
        if not 0 < len(unchanged) < len(sizes):
            return self._groups
        for key in sizes.keys() - unchanged:
            self._quiet[key] = 0
            if self._groups.pop(key, 0):
                self._returned[key] += 1
        joining = []
        for key in unchanged:
            self._quiet[key] += 1
            if key not in self._groups and self._quiet[key] >= 2 ** min(self._returned[key], MOST_DOUBLINGS):
                joining.append(key)
        if sum(sizes[key] for key in joining) >= WORTH_A_FILE:
            number = max(self._groups.values(), default=0) + 1
            if len(set(self._groups.values())) == MOST_GROUPS:
                self._groups = dict.fromkeys(self._groups, number)
            self._groups.update(dict.fromkeys(joining, number))
        return dict(self._groups)
