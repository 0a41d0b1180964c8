"""Kills and resumes many trainings, and compares what the flight recorder says with a judge from outside.

Usage: ``python tools/recorder_campaign.py [--only TEXT ...] [--kills 1,3 2,0 2,5] [--every 2]``; the exit status is 1
if the recorder disagreed with the judge.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.lightning_ckpt.recorded_runs import CASES, judge

__all__ = ["main"]

_DISAGREES = ("false alarm", "WRONGLY EQUAL")


def main() -> int:
    """Run the campaign; return how many resumes were judged differently."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose name holds one of these")
    parser.add_argument("--kills", nargs="+", default=["1,3", "2,0", "2,5"], help="epoch,batch before which to kill")
    parser.add_argument("--every", type=int, default=2, help="steps between two saves")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    for name, case in CASES.items():
        if not any(text in name for text in options.only):
            continue
        for kill in options.kills:
            with tempfile.TemporaryDirectory() as directory:
                found = judge(case, [int(n) for n in kill.split(",")], Path(directory), every=options.every)
            counts[found.verdict] += 1
            exact = {True: "exact", False: "NOT exact", None: "-"}[found.is_exact]
            what = ", ".join(found.differs) or found.recorder or found.problem[-300:] or "; ".join(found.warned)
            print(f"{name:50s} {kill:5s} {exact:9s} {found.repeated:3d} repeated  {found.verdict}: {what}", flush=True)
    print(f"\n{sum(counts.values())} resumes in {time.monotonic() - begun:.0f} s: {dict(counts)}")
    return sum(counts[verdict] for verdict in _DISAGREES)


if __name__ == "__main__":
    sys.exit(main() > 0)
