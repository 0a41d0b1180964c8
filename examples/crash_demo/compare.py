"""Compare two finished runs bit for bit.

python compare.py RUN OTHER_RUN
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from records import read_lines

LOGGED = ("step", "loss", "learning_rate")


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared part: what it is, how it reads in each run, and how it differs (empty: not at all)."""

    part: str
    left: str
    right: str
    difference: str

    @property
    def equal(self) -> bool:
        return not self.difference


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten a nested state to its leaves, named by their place."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    flat = {name: leaf for key, item in items for name, leaf in leaves(item, f"{path}.{key}" if path else key).items()}
    return flat or {path: value}


_RECORDS = ("changed", "recorder", "variables")


def without_records(state: Any) -> Any:
    """Return a state without records of the run that saved it, such as times: a resume compares them, not this demo."""
    if isinstance(state, dict):
        return {name: without_records(value) for name, value in state.items() if name not in _RECORDS}
    return [without_records(value) for value in state] if isinstance(state, list) else state


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two leaves are equal to the last bit; a NaN equals the same NaN."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        as_bytes = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
        return torch.equal(*as_bytes)
    return type(left) is type(right) and repr(left) == repr(right)


def difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Return how two flat states differ, or an empty text."""
    if left.keys() != right.keys():
        return f"only in one of them: {sorted(left.keys() ^ right.keys())[:3]}"
    unequal = [name for name in left if not same_bits(left[name], right[name])]
    if not unequal:
        return ""
    example = unequal[0]
    a, b = left[example], right[example]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        detail = f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
    else:
        detail = f"{a!r} and {b!r}"
    return f"{len(unequal)} of {len(left)} differ, first {example} {detail}"


def describe(flat: dict[str, Any]) -> str:
    """Return as text how much there is in a flat state."""
    tensors = [leaf for leaf in flat.values() if isinstance(leaf, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors) / 1e6
    return f"{len(tensors)} tensors, {size:.1f} MB" if size >= 0.1 else f"{len(flat)} values"


def last_of_each_batch(log: Path) -> tuple[dict[str, Any], int, str]:
    """Read a rank's step log.

    Returns:
        The last entry of each batch, the number of repeated batches, and how a repetition differs from the batch that
        the kill threw away (empty: not at all).
    """
    entries: dict[str, Any] = {}
    repeated, complaint = 0, ""
    for record in read_lines(log):
        key = f"epoch {record['epoch']} batch {record['batch']}"
        entry = {name: record[name] for name in LOGGED}
        if key in entries:
            repeated += 1
            if entries[key] != entry:
                complaint = complaint or f"the repeated {key} differs from its first time"
        entries[key] = entry
    return entries, repeated, complaint


def compare(left: Path, right: Path) -> list[Row]:
    """Compare the final checkpoints and the logs of all ranks of two runs."""
    rows = []
    states = [torch.load(run / "final.ckpt", map_location="cpu", weights_only=True) for run in (left, right)]
    parts = {
        "weights": "state_dict",
        "optimizer": "optimizer_states",
        "learning-rate schedule": "lr_schedulers",
        "loop counters": "loops",
        "random and data state": "lightning_ckpt",
    }
    for part, key in parts.items():
        if not any(key in state for state in states):
            continue
        a, b = (leaves(without_records(state.get(key, {}))) for state in states)
        rows.append(Row(part, describe(a), describe(b), difference(a, b)))

    metrics = [leaves(read_result(run)) for run in (left, right)]
    rows.append(Row("final metrics", *(f"loss {m['loss']:.6f}" for m in metrics), difference(*metrics)))

    logs = sorted({log.name for run in (left, right) for log in run.glob("steps-rank*.jsonl")})
    for name in logs:
        (a, repeats_a, odd_a), (b, repeats_b, odd_b) = (last_of_each_batch(run / name) for run in (left, right))
        sizes = (f"{len(a)} batches{repetitions(repeats_a)}", f"{len(b)} batches{repetitions(repeats_b)}")
        rank = name.removeprefix("steps-").removesuffix(".jsonl").replace("rank", "rank ")
        rows.append(Row(f"loss log, {rank}", *sizes, difference(leaves(a), leaves(b)) or odd_a or odd_b))
    return rows


def repetitions(count: int) -> str:
    return f" (+{count} repeated)" if count else ""


def read_result(run: Path) -> dict[str, Any]:
    """Return the result that the training script wrote at its end."""
    return dict(json.loads((run / "result.json").read_text()))


def table(rows: list[Row], left: str, right: str) -> str:
    """Return the comparison as a table of text."""
    cells = [("", left, right, "same bits")]
    cells += [(row.part, row.left, row.right, "yes" if row.equal else f"NO: {row.difference}") for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}  {line[2]:<{widths[2]}}  {line[3]}" for line in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    left, right = (Path(argument) for argument in sys.argv[1:])
    rows = compare(left, right)
    print(table(rows, left.name, right.name))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
