"""Kill a training again and again, resume it each time, and show that it ends with the bits of an uninterrupted run.

    python run.py --output demo_output

Trains a small GPT on two CPU processes with DDP and asynchronous saves. The run is made three times: uninterrupted;
with the whole job killed by SIGKILL (the first time while a save is being written, then at a random moment) and resumed
after each kill; and with Lightning's own checkpoints, to see the difference. Writes ``timeline.png``, ``timeline.html``
and a report of each run, and exits with 1 if any bit of the weights, the optimizer or the loss log differs. Arguments
after ``--`` go to the training script.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from compare import compare, table
from job import TrainingJob
from page import write_page
from picture import draw
from records import LogTail, read_lines, read_run, typical_stall

# Some 230 MB of state, and few tokens, so that steps stay short on two cores.
MODEL = ["--width", "512", "--block-size", "32", "--batch-size", "2"]
DURING_SAVE = "while a save is being written"
AT_RANDOM = "at a random moment"


def kill_during_save(job: TrainingJob, after_step: int, delay: float) -> bool:
    """Kill the job while a snapshot that it took is on its way to the disk.

    Args:
        job: The running job.
        after_step: Let it do this many steps first.
        delay: Seconds between seeing the snapshot and the kill.

    Returns:
        False if the job ended before it took a snapshot.
    """
    if not wait_for_step(job, after_step):
        return False
    # Not the very first save: there would be nothing to resume from.
    saved = LogTail(job.events)
    if not job.wait_until(lambda: any(event["event"] == "SaveCommitted" for event in saved.new())):
        return False
    events, writing = LogTail(job.events, from_end=True), set()

    def being_written() -> bool:
        for event in events.new():
            if event["event"] == "SnapshotTaken":
                writing.add(event["path"])
            elif event["event"] == "SaveCommitted":
                writing.discard(event["path"])
        return bool(writing)

    if not job.wait_until(being_written):
        return False
    time.sleep(delay)
    job.kill(DURING_SAVE)
    return True


def kill_at_random(job: TrainingJob, after_step: int, delay: float) -> bool:
    """Kill the job some time after a step, whatever it is doing then; return False if it ended before."""
    if not wait_for_step(job, after_step):
        return False
    time.sleep(delay)
    if not job.running():
        return False
    job.kill(AT_RANDOM)
    return True


def wait_for_step(job: TrainingJob, number: int) -> bool:
    """Wait until this job, not an earlier one, has done a step with at least this number."""
    steps = LogTail(job.steps)

    def reached() -> bool:
        return any(step["step"] >= number and step["start"] >= job.launched for step in steps.new())

    return job.wait_until(reached, poll_seconds=0.01)


def train_with_kills(
    directory: Path, arguments: list[str], kills: int, steps: int, dice: random.Random, writing: float
) -> None:
    """Train, kill and resume until the training is done.

    Args:
        directory: The run's directory.
        arguments: Arguments of the training script.
        kills: Number of kills; the first is repeated until it did hit a save, and each miss counts as a random one.
        steps: Optimizer steps of the training.
        dice: The generator of the random choices.
        writing: How long a save is written in the background, in seconds.

    Raises:
        RuntimeError: The training ended before all kills were done.
    """
    aims = [DURING_SAVE] + [AT_RANDOM] * (kills - 1) if kills else []
    job = TrainingJob(directory, arguments)
    done, reached = 0, 0
    while aims:
        part = (steps - reached) // (len(aims) + 1)
        after_step = reached + dice.randint(part // 3, part)
        if aims[0] == DURING_SAVE:
            killed = kill_during_save(job, after_step, dice.uniform(0.0, 0.5 * writing))
        else:
            killed = kill_at_random(job, after_step, dice.uniform(0.0, 0.3))
        if not killed:
            raise RuntimeError("the training ended before it could be killed; give it more --steps")
        done += 1
        last = read_lines(directory / "jobs.jsonl")[-1]
        reached = max(step["step"] for step in read_lines(job.steps))
        found = f"during a save: {', '.join(Path(path).name for path in last['during_save']) or 'no'}"
        print(f"  kill {done}: {last['aim']}, after step {reached} ({found})", flush=True)
        if aims[0] == AT_RANDOM or last["during_save"]:
            aims.pop(0)
        elif len(aims) > 1:
            aims.pop()  # too late for the save: that was a random one, so aim at another save
        job = TrainingJob(directory, [*arguments, "--resume"])
    job.finish()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    parser.add_argument("--steps", type=int, default=48, help="optimizer steps (default: 48)")
    parser.add_argument("--every", type=int, default=6, help="steps between saves (default: 6)")
    parser.add_argument("--kills", type=int, default=2, help="kills of the whole job (default: 2)")
    parser.add_argument("--seed", type=int, default=None, help="repeat the kill moments of an earlier demo")
    parser.add_argument("training", nargs="*", help="further arguments of the training script, after --")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the job under way is ended as well
    began = time.monotonic()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    dice = random.Random(seed)
    alone, killed, stock = (options.output / name for name in ("uninterrupted", "killed", "stock"))
    for directory in (alone, killed, stock):
        shutil.rmtree(directory, ignore_errors=True)
    arguments = ["--cpu", "--devices", "2", "--max-steps", str(options.steps), "--every-n-steps", str(options.every)]
    arguments += ["--batches-per-epoch", str(options.steps // 3), *MODEL, *options.training]

    print(f"kill moments from seed {seed}\n1. uninterrupted, asynchronous saves", flush=True)
    TrainingJob(alone, arguments).finish()
    print(f"2. the same, killed {options.kills} times", flush=True)
    writing = statistics.median(save.background_seconds for save in read_run(alone).saves)
    train_with_kills(killed, arguments, options.kills, options.steps, dice, writing)
    print("3. the same, Lightning's own checkpoints", flush=True)
    TrainingJob(stock, [*arguments, "--strategy-io", "none"]).finish()

    rows = compare(alone, killed)
    exact = all(row.equal for row in rows)
    runs = [read_run(directory) for directory in (alone, killed, stock)]
    figure, notes = draw(*runs, exact=exact)
    figure.savefig(options.output / "timeline.png", dpi=110)
    write_page(options.output / "timeline.html", figure, notes, runs, rows)

    print("\n" + table(rows, "uninterrupted", "killed and resumed") + "\n")
    for name, run in (("with AsyncCheckpointIO", runs[0]), ("with Lightning's own", runs[2])):
        typical, in_all = 1000 * typical_stall(run).seconds, 1000 * run.stall_seconds
        print(f"{name}: {len(run.saves)} saves stop training for {typical:.0f} ms typically, {in_all:.0f} ms in all")
    print(f"report of the killed run: {killed / 'report.html'}")
    print(f"timeline: {options.output / 'timeline.png'} and {options.output / 'timeline.html'}")
    print(f"whole demo: {time.monotonic() - began:.0f} s\n")
    if not exact:
        print("DIFFERENT: the killed and resumed run did not end like the uninterrupted one (see the table).")
        return 1
    print(f"BIT-EXACT: killed {len(runs[1].kills)} times, resumed, and equal to the uninterrupted run in every bit.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
