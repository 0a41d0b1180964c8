"""``make bench``: ours, the peers and the physical limits, side by side in one run; prints ratios.

Every figure is a median, except the limits of saves and loads, which are their fastest round. Compare ratios within one
run: absolute times depend on the machine and on its other load. Each table runs in a process of its own, so that none
inherits another's memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# Name of the table -> module whose ``table(options, directory)`` prints it and returns its figures.
TABLES = {
    "save": "benchmarks.save_table",
    "step": "benchmarks.step",
    "accelerate": "benchmarks.accelerate_table",
    "sharded": "benchmarks.sharded",
    "unchanged": "benchmarks.unchanged",
    "async_cut": "benchmarks.async_cut",
    "store": "benchmarks.store",
}


def main() -> None:
    """Run the tables named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"which: {', '.join(TABLES)}; all by default")
    parser.add_argument("--layers", type=int, default=12, help="size of the GPT whose state is saved (12: 1.49 GB)")
    parser.add_argument("--tensors", type=int, help="in the table save: so many tensors of one size, and no GPT")
    parser.add_argument("--tensor-mb", type=float, default=10.0, help="their size in MB")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state in the table store")
    parser.add_argument(
        "--server", choices=("rclone", "ceph"), default="rclone", help="the S3 server of the table store"
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds; one more is a warm-up")
    parser.add_argument("--idle", type=float, default=4.0, help="seconds of idling before each save")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=Path("benchmark_output"), help="where the .json files go")
    options = parser.parse_args()
    unknown = [name for name in options.tables if name not in TABLES]
    if unknown:
        parser.error(f"there is no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    if len(options.tables) == 1:
        _run(options.tables[0], options)
        return
    for name in options.tables or TABLES:
        print(f"\n=== {name} ===", flush=True)
        subprocess.run([sys.executable, __file__, name, *sys.argv[1 + len(options.tables) :]], check=True)


def _run(name: str, options: argparse.Namespace) -> None:
    directory = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=options.directory))
    try:
        results = importlib.import_module(TABLES[name]).table(options, directory)
    finally:
        shutil.rmtree(directory)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
