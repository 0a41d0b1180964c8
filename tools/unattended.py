"""Interrupts unattended runs at any moment, and prints what was lost (``tests/chaos/unattended.py``).

python tools/unattended.py lightning --interruptions 40 --launcher torchrun --ranks 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.unattended import FRAMEWORKS, LAUNCHERS, campaign


def main() -> int:
    """Run the campaign; return 1 if a run hung or ended with different bits."""
    parser = argparse.ArgumentParser(description="Interrupt runs that need no person.")
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--interruptions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="fork")
    parser.add_argument("--json", help="a file that gets a line with all that was found")
    parser.add_argument("--just-in-time", action="store_true", help="kill one rank at a time; the others save")
    parser.add_argument("--shards", type=int, default=1, help="of the model, each on several ranks (Lightning, HSDP)")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="unattended-"))
    print(f"{options.framework}, {options.ranks} ranks, {options.launcher}: files are in {directory}", flush=True)
    found = campaign(
        options.framework,
        directory / "campaign",
        options.interruptions,
        seed=options.seed,
        launcher=options.launcher,
        ranks=options.ranks,
        just_in_time=options.just_in_time,
        shards=options.shards,
    )
    if options.json:
        with open(options.json, "a") as file:
            print(json.dumps({**vars(options), **found}), file=file)
    statuses = found.pop("statuses")
    for what in ("lost_batches", "moments"):
        for kind, steps in sorted(found.pop(what).items()):
            print(
                f"{kind:28} {len(steps):4} times, batches lost: mean {sum(steps) / len(steps):.1f}, most {max(steps)}"
            )
    for kind, counts in sorted(statuses.items()):
        print(f"{kind:28} exit statuses {counts}")
    print(found)
    failed = bool(found["hangs"] or found["different"])
    if failed or found["warned"] or found["killed_after_grace"] or found["costly"]:
        print(f"logs are in {directory}")
    else:
        shutil.rmtree(directory)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
