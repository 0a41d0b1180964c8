"""Kill trainings again and again, and check after every kill that nothing that was saved is lost.

    python tools/chaos.py --kills 100

Each run is a real Lightning training with ``ResumableCheckpoint``: synchronous or asynchronous, with or without gradient
accumulation, on one process or with DDP on two. It is killed with SIGKILL, most often inside a save, and resumed, several
times over, and must end with every bit of a run that was never killed. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.campaign import Campaign


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default: 100)")
    parser.add_argument("--parallel-share", type=float, default=0.1, help="share of runs on two ranks (default: 0.1)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the plan of an earlier campaign")
    parser.add_argument("--directory", type=Path, default=None, help="where the runs live (default: a temporary one)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}, runs in {directory}", flush=True)
    campaign = Campaign(directory.resolve(), seed, lambda line: print(line, flush=True))
    report = campaign.run(options.kills, parallel_share=options.parallel_share)
    print("\n" + report.table())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
