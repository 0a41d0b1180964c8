"""Resume many trainings, judge each resume from outside, and compare that with what the user was warned about.

    python tools/recorder_campaign.py
    python tools/recorder_campaign.py --only "loader: stream" --frameworks lightning --points middle epoch-end
    python tools/recorder_campaign.py --device cuda

Each case trains once without interruption and is resumed from several points, in processes of their own. A resume that
is not exact must be warned about, by Python or by the flight recorder, and an exact resume must not. Cases whose
packages are not installed are skipped and listed (`pip install datasets webdataset litdata`; mosaicml-streaming needs
an older environment). Exits with 1 if a resume was silently inexact, falsely warned about, or crashed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "--device" in sys.argv[:-1]:  # before any module reads it
    os.environ["CAMPAIGN_DEVICE"] = sys.argv[sys.argv.index("--device") + 1]
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that asked CUDA instead could not be forked
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.campaign import judging
from tests.campaign.device import DEVICE, IS_HOST
from tests.campaign.judging import BAD, NEVER_RAN, Judgement

FRAMEWORKS = ("lightning", "accelerate")


def _load(framework: str) -> tuple[Mapping[str, Any], Mapping[str, Any], Any]:
    cases = importlib.import_module(f"tests.campaign.{framework}_cases")
    runs = importlib.import_module(f"tests.campaign.{framework}_runs")
    if IS_HOST:
        return cases.CASES, cases.BROKEN, runs
    on_devices = importlib.import_module(f"tests.campaign.{framework}_device_cases").CASES
    return {**{f"{DEVICE}: {name}": case for name, case in on_devices.items()}, **cases.CASES}, cases.BROKEN, runs


def main() -> int:
    """Run the campaign; return the number of bad resumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="(default: both)")
    parser.add_argument("--device", default="cpu", help="what to train on, as cuda (default: the host)")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose name holds one of these")
    parser.add_argument("--points", nargs="+", default=[], help="only these points")
    parser.add_argument("--part", default="0/1", help="one case of so many, as in 0/2 and 1/2")
    parser.add_argument("--killed", type=int, default=4, help="every so manieth case is killed with SIGKILL, too")
    parser.add_argument("--verbose", action="store_true", help="print exact resumes, too")
    parser.add_argument("--keep", action="store_true", help="keep the directories of those that are bad")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    skipped, configurations, begun = list[str](), 0, time.monotonic()
    part, parts = (int(number) for number in options.part.split("/"))
    for framework in options.frameworks:
        cases, broken, runs = _load(framework)
        all_cases = {**cases, **{f"engine: {name}": case for name, case in broken.items()}}
        for number, (short, case) in enumerate(all_cases.items()):
            name = f"{framework}: {short}"
            if number % parts != part or not any(text in name for text in options.only):
                continue
            missing = [package for package in case.needs if importlib.util.find_spec(package) is None]
            if missing:
                skipped.append(f"{name} (no {', '.join(missing)})")
                continue
            configurations += 1
            killed = [runs.KILLED] if options.killed and number % options.killed == 0 else []
            points = [p for p in [*runs.POINTS, *killed] if not options.points or p.name in options.points]
            directory = judging.scratch()
            found = runs.judge(case, directory, points)
            if not IS_HOST and any(judgement.problem.startswith(NEVER_RAN) for judgement in found.values()):
                skipped.append(f"{name} (does not train on {DEVICE})")
                configurations -= 1
                continue
            for point, judgement in found.items():
                counts[judgement.verdict] += 1
                counts["resumes"] += 1
                counts["killed with SIGKILL"] += point == runs.KILLED.name
                counts["compared by the recorder"] += bool(judgement.recorder)
                counts["the recorder says equal, others warn"] += _only_others(judgement)
                if options.verbose or judgement.verdict != "exact":
                    print(f"{name:56s} {point:11s} {judgement.words}", flush=True)
            if not options.keep or not any(judgement.verdict in BAD for judgement in found.values()):
                shutil.rmtree(directory, ignore_errors=True)
            else:
                print(directory)
    print(f"\n{configurations} configurations in {time.monotonic() - begun:.0f} s: {dict(counts)}")
    for name in skipped:
        print(f"skipped: {name}")
    return sum(counts[verdict] for verdict in BAD)


def _only_others(judgement: Judgement) -> bool:
    return bool(judgement.verdict == "said" and judgement.recorder and not judgement.differs)


if __name__ == "__main__":
    sys.exit(main() > 0)
