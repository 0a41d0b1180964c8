"""What users import: a name that goes or is renamed breaks their programs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ERRORS = {
    "CheckpointCorruptedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "OutOfMemoryError",
    "RankFailedError",
    "SerializationError",
    "SnapshotTornError",
    "StateMismatchError",
    "StorageError",
    "UnsafeCheckpointError",
}
EXPORTED = {
    "ckpt_core": ERRORS
    | {"Catalog", "CheckpointInfo", "Checkpointer", "DirectoryCheckpoint", "DirectoryCheckpointer", "EventLog", "Kind"}
    | {"LoadReport", "load_into"}
    | {"Part", "RankGroup", "Tiers", "policies", "storage", "verify", "wait_staged"},
    "ckpt_core.survivors": {
        "EVERYTHING",
        "NO_PLACE",
        "WAIT_SECONDS",
        "BufferCopies",
        "LiveWeights",
        "Rescue",
        "Survivors",
        "ignoring_signals",
        "no_rescue",
        "shards_of",
        "wait_seconds_of",
        "why_not_replicas",
    },
    "ckpt_core.errors": ERRORS | {"none_verifies"},
    "ckpt_core.events": {
        "CheckpointLoaded",
        "CheckpointRemoved",
        "CheckpointSkipped",
        "CheckpointUploaded",
        "Event",
        "EventLog",
        "Listener",
        "ResumeCompared",
        "SaveCommitted",
        "SaveFailed",
        "SaveStarted",
        "SnapshotTaken",
        "RunSummary",
        "TrainingEnded",
        "TrainingStarted",
        "UploadFailed",
        "UploadProgressed",
        "size_in_words",
        "notify",
    },
    "ckpt_core.interchange": {
        "CkptStorageReader",
        "CkptStorageWriter",
        "Foreign",
        "LoadReport",
        "load_into",
        "recognize",
        "check_dcp",
        "convert_to_accelerate",
        "convert_to_dcp",
        "convert_to_directory",
        "convert_to_file",
        "export_dcp",
        "export_model",
        "import_dcp",
        "import_model",
        "is_stock_accelerate",
        "is_stock_distributed",
        "load_whole",
    },
    "ckpt_core.listeners.opentelemetry": {"OpenTelemetryListener"},
    "ckpt_core.listeners.prometheus": {"PrometheusListener"},
    "ckpt_core.report": {
        "BROWSERS",
        "draw",
        "page_beside",
        "Interruption",
        "Process",
        "Save",
        "interruptions_of",
        "page_of",
        "read_events",
        "run_in_words",
        "seconds_in_words",
        "totals_of",
        "try_to_write",
        "write_page",
    },
    "ckpt_core.policies": {
        "AnyOf",
        "KeepAtSteps",
        "KeepBest",
        "KeepEverySteps",
        "KeepEveryTime",
        "KeepLatest",
        "RetentionHistory",
        "RetentionPolicy",
        "SaveInterval",
        "SaveSchedule",
        "SavedCheckpoint",
        "best_interval",
        "RULES_IN_WORDS",
        "numbers_in",
        "policy_of_words",
        "rules_of_words",
        "to_delete",
    },
    "ckpt_core.preemption": {
        "EXIT_NOTICE",
        "NOT_SAVED",
        "End",
        "EndWatch",
        "Notices",
        "Preemption",
        "SignalNotes",
        "exit_status",
    },
    "ckpt_core.resume": {"ResumeAttempts", "ResumePoint", "folder_of_run", "newest_to_resume", "only_checkpoints"},
    "ckpt_core.storage": {
        "MANIFEST_NAME",
        "Fault",
        "FaultyStorage",
        "FileInfo",
        "FileReader",
        "FileWriter",
        "LocalStorage",
        "Operation",
        "Storage",
        "is_remote",
        "local_path",
        "refuse_missing_bucket",
        "refuse_unwritable",
        "refuse_wrong_directory",
        "storage_for",
    },
    "lightning_ckpt": {"AsyncCheckpointIO", "ResumableCheckpoint", "ShardedCheckpointIO", "SyncCheckpointIO"}
    | {"WarmStart", "load_from_checkpoint"},
    "accelerate_ckpt": {
        "CheckpointConfig",
        "CheckpointProjectConfiguration",
        "FolderNotFoundError",
        "attach",
        "warm_start",
    },
}
# Names that users may import from these modules, too, whether or not ``__all__`` lists them there.
ALSO_THERE = {
    "ckpt_core.tiers": {"MemoryTier", "Tiers"},
    "ckpt_core.directory": {"DirectoryCheckpoint", "DirectoryCheckpointer"},
    "ckpt_core.checkpointer": {"Checkpointer"},
    "ckpt_core.testing": {"assert_resumes_exactly"},
    "ckpt_core.rehearsal": {"CannotRehearseError", "Difference", "Resumed", "Result", "rehearse"},
    "ckpt_core.catalog": {"Catalog", "CheckpointInfo"},
    "ckpt_core.state.rng": {"RngState"},
    "ckpt_core.tree": {"tensors"},
    "lightning_ckpt.parameter_server": {"ParameterServerWorker"},
    "accelerate_ckpt.integrations.transformers": {"ResumableCallback"},
    "accelerate_ckpt.config": {"CheckpointConfig"},
    "ckpt_async.consistent_cut": {"COORDINATOR", "ConsistentCut", "UpdateId", "VectorClock", "deal_streams"}
    | {"CutShard", "CutWorker", "ShardState", "SnapshotCoordinator"},
    "ckpt_async.consistent_cut.effects": {"CommitCut", "PersistShard", "PersistWorker", "Send"},
    "ckpt_async.local_updates": {"DiLoCo", "GatedWorker", "StepGate", "StreamCursor", "TorchftLoop", "WorkerState"}
    | {"DiLoCoState", "GateTimeoutError"},
    "ckpt_async.parameter_server": {"CutStore", "ParameterClient", "ParameterServer", "RemoteOptimizer"}
    | {"Frame", "Handler", "Peer", "SocketTransport", "TrainingCoordinator", "Transport"},
}
_IMPORT = re.compile(
    r"^ *from ((?:ckpt_|lightning_ckpt|accelerate_ckpt)[\w.]*) import (\([^)]*\)|[^\n#]+)", re.MULTILINE
)


@pytest.mark.parametrize("package", EXPORTED)
def test_a_package_exports_these_names_and_no_others(package: str) -> None:
    module = importlib.import_module(package)
    exported = set(module.__all__)
    assert exported == EXPORTED[package]
    assert {name for name in exported if not hasattr(module, name)} == set()


@pytest.mark.parametrize("module", ALSO_THERE)
def test_a_module_has_these_names(module: str) -> None:
    assert ALSO_THERE[module] - set(dir(importlib.import_module(module))) == set()


def test_no_exported_name_is_of_a_private_class() -> None:
    for package in EXPORTED:
        module = importlib.import_module(package)
        private = [name for name in module.__all__ if getattr(getattr(module, name), "__name__", name).startswith("_")]
        assert private == [], package


def test_what_the_docs_and_examples_import_is_promised() -> None:
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "examples").rglob("*.py")]
    found = [found for page in pages for found in _IMPORT.findall(page.read_text(encoding="utf-8"))]
    imported = {f"{module}.{name}" for module, names in found for name in re.findall(r"\w+", names)}
    promised = {f"{module}.{name}" for names in (EXPORTED, ALSO_THERE) for module in names for name in names[module]}
    assert len(imported) > 50
    assert imported - promised == set()
