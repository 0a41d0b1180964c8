"""The flight recorder: records each training step in a file that survives SIGKILL, and compares repeated steps.

A resumed run repeats the steps that the interrupted run did after its last checkpoint. The recorder compares the two,
step by step (``flight_recorder``), and reports that they were equal, or at the first difference what differs.
"""

from __future__ import annotations

from ckpt_core.recorder.fingerprints import WeightSample, digest_batch, digest_generators, digest_numbers
from ckpt_core.recorder.flight_recorder import FlightRecorder, Verdict, rates_of, say
from ckpt_core.recorder.ring import Record, record_path

__all__ = [
    "FlightRecorder",
    "Record",
    "Verdict",
    "WeightSample",
    "digest_batch",
    "digest_generators",
    "digest_numbers",
    "rates_of",
    "record_path",
    "say",
]
