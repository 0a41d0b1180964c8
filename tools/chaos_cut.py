"""Kill asynchronous trainings again and again, and check each checkpoint by the model's own count of its samples.

    python tools/chaos_cut.py --kills 250

Each training is a coordinator, parameter servers and workers, real processes that talk over sockets. All of them are
killed with SIGKILL at a random instant and restarted from the newest checkpoint: with unaligned and aligned cuts, with
messages that are reordered and duplicated, with a straggler, with changing numbers of servers and workers, with
snapshots back to back. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.cut_campaign import SCENARIOS, Campaign


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=250, help="number of kills (default: 250)")
    parser.add_argument("--epochs", type=int, default=12, help="length of each training (default: 12)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the plan of an earlier campaign")
    parser.add_argument("--directory", type=Path, default=None, help="where the runs live (default: a temporary one)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-cut-"))
    print(f"seed {seed}, trainings in {directory}", flush=True)
    campaign = Campaign(directory.resolve(), seed, lambda line: print(line, flush=True), epochs=options.epochs)
    report = campaign.run(options.kills, SCENARIOS)
    print("\n" + report.table())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
