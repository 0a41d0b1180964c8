"""Kill trainings again and again, and check after every kill that no saved state is lost.

    python tools/chaos.py --kills 1000
    python tools/chaos.py --kills 100 --only lightning-async-local,accelerate-sharded-s3

Each run is a real training with Lightning or Accelerate, with one or two ranks, that saves to a local disk or to an S3
server that is started for it. It is killed with SIGKILL, most often inside a save, and resumed, several times over,
and must end with the same bits as a run that was never killed. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.cells import CELLS, plan
from tests.chaos.crew import run_all
from tests.support.descendants import none_left


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default: 100)")
    parser.add_argument("--only", default=",".join(CELLS), help=f"cells, by commas (default: {','.join(CELLS)})")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time (default: 2)")
    parser.add_argument("--s3", default="rclone", help="the server: rclone, moto or ceph (default: rclone)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the plan of an earlier campaign")
    parser.add_argument("--directory", type=Path, default=None, help="where the runs live (default: a temporary one)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    print(f"seed {seed}, runs in {directory}", flush=True)
    work = plan(options.kills, options.only.split(","))
    with none_left():
        report = run_all(
            work, directory, seed, lambda line: print(line, flush=True), jobs=options.jobs, server=options.s3
        )
    print("\n" + report.table())
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
