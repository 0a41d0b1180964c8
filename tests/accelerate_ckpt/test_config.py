"""The options: their values, the sources that they come from, and the errors that name both."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from accelerate_ckpt.config import CheckpointConfig, OptionError

ROOT = Path(__file__).parents[2]


def collected(flags: dict[str, Any] | None = None, variables: dict[str, str] | None = None) -> CheckpointConfig:
    return CheckpointConfig.from_sources(flags, variables=variables or {})


def refusal(flags: dict[str, Any] | None = None, variables: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as refused:
        collected(flags, variables)
    return str(refused.value)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "options.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults() -> None:
    assert dataclasses.asdict(collected()) == {
        "strategy": "async",
        "wait": False,
        "max_pending": 1,
        "on_error": "raise",
        "mid_accumulation": "grads",
        "commit_timeout": 600.0,
        "retention": None,
        "local_dir": None,
        "upload_to": None,
        "keep_local": None,
        "storage_options": None,
        "allow_pickle": False,
        "resume": None,
        "resume_attempts": 3,
        "checkpoint_dir": None,
        "preempt": None,
        "interval": None,
        "mtbf": None,
        "max_overhead": None,
        "memory_every_n_steps": None,
        "memory_dir": "/dev/shm",
        "just_in_time": False,
        "event_log": None,
        "report": None,
        "log_metrics": False,
        "listeners": (),
        "overlap": False,
        "max_host_bytes": None,
        "recorder": True,
    }


def test_a_flag_goes_before_a_variable_and_a_variable_before_the_file(file: Any) -> None:
    path = file("strategy: sharded\nmax_pending: 7\non_error: warn\n")
    variables = {
        "ACCELERATE_CKPT_CONFIG": path,
        "ACCELERATE_CKPT_MAX_PENDING": "5",
        "ACCELERATE_CKPT_ON_ERROR": "raise",
    }
    config = collected({"on_error": "warn", "strategy": None}, variables)
    assert (config.strategy, config.max_pending, config.on_error) == ("sharded", 5, "warn")


def test_the_file_of_the_flag_replaces_that_of_the_variable(file: Any, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("max_pending: 3\n")
    variables = {"ACCELERATE_CKPT_CONFIG": file("strategy: sync\nmax_pending: 2\n")}
    assert collected({"config": str(other)}, variables) == CheckpointConfig(max_pending=3)


def test_the_environment_of_the_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CKPT_STRATEGY", "sync")
    monkeypatch.setenv("ACCELERATE_CKPT_EVENT_LOG", "")  # how a shell unsets one for a single command
    assert CheckpointConfig.from_sources() == CheckpointConfig(strategy="sync")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("strategy", "sharded", "sharded"),
        ("wait", "true", True),
        ("wait", "No", False),
        ("max_pending", "12", 12),
        ("commit_timeout", "2.5", 2.5),
        ("commit_timeout", "30", 30.0),
        ("storage_options", '{"endpoint_url": "http://127.0.0.1:9000", "use_ssl": false}', ...),
        ("event_log", "2024", "2024"),
    ],
)
def test_text_becomes_a_value_of_the_options_type(name: str, text: str, value: Any) -> None:
    if value is ...:
        value = {"endpoint_url": "http://127.0.0.1:9000", "use_ssl": False}
    for config in (collected({name: text}), collected(None, {f"ACCELERATE_CKPT_{name.upper()}": text})):
        found = getattr(config, name)
        assert found == value and type(found) is type(value)


def test_every_option_can_be_given_in_the_file(file: Any) -> None:
    path = file(
        "strategy: sharded\nwait: yes\nmax_pending: 2\non_error: warn\nmid_accumulation: defer\ncommit_timeout: 60\n"
        "storage_options:\n  anon: true\nevent_log: events.jsonl\n"
    )
    assert collected({"config": path}) == CheckpointConfig(
        strategy="sharded",
        wait=True,
        max_pending=2,
        on_error="warn",
        mid_accumulation="defer",
        commit_timeout=60.0,
        storage_options={"anon": True},
        event_log="events.jsonl",
    )


def test_an_empty_file_changes_nothing(file: Any) -> None:
    assert collected({"config": file("# nothing yet\n")}) == CheckpointConfig()


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("strategy", "asinc", "must be one of 'sync', 'async', 'sharded', not 'asinc'; did you mean 'async'?"),
        ("on_error", "ignore", "must be one of 'raise', 'warn', not 'ignore'"),
        ("mid_accumulation", "gradients", "must be one of 'grads', 'defer', 'error', not 'gradients'"),
        ("wait", "perhaps", "must be true or false, not 'perhaps'"),
        ("max_pending", "0", "must be a whole number of at least 1, not 0"),
        ("max_pending", "many", "must be a whole number of at least 1, not 'many'"),
        ("max_pending", "1.5", "must be a whole number of at least 1, not 1.5"),
        ("commit_timeout", "-1", "must be a number of seconds above 0, not -1"),
        ("commit_timeout", "nan", "must be a number of seconds above 0, not nan"),
        ("commit_timeout", "inf", "must be a number of seconds above 0, not inf"),
        ("storage_options", "[1]", "must be a mapping"),
        ("storage_options", "key=value", "must be a mapping"),
        ("preempt", '{"deadline": "soon"}', "deadline must be seconds or a time as 2026-11-22T04:00, not 'soon'"),
        ("preempt", '{"signals": "SIGTREM"}', "signals must be names of signals such as 'SIGTERM': 'SIGTREM' is no"),
        ("preempt", '{"dedline": 5}', "has no argument 'dedline'; it has signals, deadline, notice and look_every"),
    ],
)
def test_a_wrong_value_names_the_option_and_where_it_came_from(name: str, wrong: str, problem: str, file: Any) -> None:
    assert refusal({name: wrong}).startswith(f"--{name}: {name} {problem}")
    variable = f"ACCELERATE_CKPT_{name.upper()}"
    assert refusal(None, {variable: wrong}).startswith(f"{variable}: {name} {problem}")
    path = file(f"{name}: {wrong if wrong not in ('nan', 'inf') else '.' + wrong}\n")
    assert refusal({"config": path}).startswith(f"{path}:{name}: {name} {problem}")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strategy": "both"}, "strategy must be one of"),
        ({"max_pending": True}, "max_pending must be a whole number of at least 1, not True"),
        ({"max_pending": "2"}, "max_pending must be a whole number of at least 1, not '2'"),
        ({"commit_timeout": "2"}, "commit_timeout must be a number of seconds above 0, not '2'"),
        ({"wait": 1}, "wait must be true or false, not 1"),
        ({"event_log": ""}, "event_log must be the path of a file, not ''"),
        ({"event_log": 3}, "event_log must be the path of a file, not 3"),
        ({"storage_options": {1: 2}}, "storage_options must be a mapping"),
        ({"max_host_bytes": 2**25 - 1}, "max_host_bytes must be at least 33554432, 32 MiB for each of max_pending=1"),
        ({"max_host_bytes": 2**25, "max_pending": 2}, "max_host_bytes must be at least 67108864, 32 MiB for each of"),
    ],
)
def test_the_class_itself_checks_too(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=f"^{re.escape(problem)}"):
        CheckpointConfig(**options)


def test_an_unknown_option_is_refused_with_the_nearest_known_name(file: Any) -> None:
    assert refusal({"stratgy": "sync"}) == "--stratgy: there is no option 'stratgy'; did you mean 'strategy'?"
    assert refusal(None, {"ACCELERATE_CKPT_MAX_PENDINGS": "2"}) == (
        "ACCELERATE_CKPT_MAX_PENDINGS: there is no option 'max_pendings'; did you mean 'max_pending'?"
    )
    path = file("on_errors: warn\n")
    assert refusal({"config": path}) == f"{path}:on_errors: there is no option 'on_errors'; did you mean 'on_error'?"
    assert refusal({"config": file("zebra: 1\n")}) == f"{path}:zebra: there is no option 'zebra'"


def test_a_file_that_cannot_be_read_is_named_with_the_flag_that_named_it(file: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert refusal({"config": missing}).startswith(f"--config: {missing} cannot be read")
    assert refusal(None, {"ACCELERATE_CKPT_CONFIG": missing}).startswith("ACCELERATE_CKPT_CONFIG: ")
    assert "line 2" in refusal({"config": file("strategy: sync\n- wait\n")})
    assert refusal({"config": file("- strategy\n")}).endswith("must map options to values, and is a list")
    assert "cannot be read" in refusal({"config": str(tmp_path)})


def test_credentials_are_not_shown() -> None:
    config = CheckpointConfig(storage_options={"secret": "do-not-tell"})
    assert "do-not-tell" not in repr(config)
    assert "do-not-tell" not in refusal({"storage_options": "do-not-tell"})


def test_a_flag_is_called_as_its_parser_calls_it() -> None:
    with pytest.raises(OptionError, match=r"^attach\(wait=\.\.\.\): wait must be true or false, not 2"):
        CheckpointConfig.from_sources({"wait": 2}, variables={}, flag_name="attach({}=...)")


@pytest.mark.parametrize(
    ("strategy", "wait", "is_async", "slices"),
    [
        ("sync", False, False, False),
        ("async", False, True, False),
        ("async", True, False, False),
        ("sharded", False, True, True),
        ("sharded", True, False, True),
    ],
)
def test_what_a_strategy_means(strategy: Any, wait: bool, is_async: bool, slices: bool) -> None:
    config = CheckpointConfig(strategy=strategy, wait=wait)
    assert (config.is_async, config.slices_replicated) == (is_async, slices)


def test_a_configuration_is_a_value(tmp_path: Path) -> None:
    config = CheckpointConfig(event_log=tmp_path / "log", storage_options={"a": [1]})  # type: ignore[arg-type]
    assert config.event_log == str(tmp_path / "log")
    assert pickle.loads(pickle.dumps(config)) == config and hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_pending = 2  # type: ignore[misc]


def test_the_project_configuration_carries_the_options(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from accelerate_ckpt import CheckpointProjectConfiguration

    project = CheckpointProjectConfiguration(
        str(tmp_path), total_limit=2, checkpoints=CheckpointConfig(strategy="sync")
    )
    kept = Accelerator(project_config=project).project_configuration
    assert isinstance(kept, CheckpointProjectConfiguration)
    assert (kept.checkpoints.strategy, kept.total_limit, kept.project_dir) == ("sync", 2, str(tmp_path))
    assert CheckpointProjectConfiguration().checkpoints == CheckpointConfig()


def test_the_example_file_states_the_defaults() -> None:
    assert collected({"config": str(ROOT / "configs/accelerate/checkpoints.yaml")}) == CheckpointConfig()


def test_importing_the_options_imports_nothing_that_reads_variables(run_script: Any) -> None:
    done = run_script(
        """
        import sys
        from accelerate_ckpt import CheckpointConfig, launcher
        CheckpointConfig.from_sources()
        print([name for name in ("accelerate", "fsspec", "numpy", "torch", "transformers") if name in sys.modules])
        """
    )
    assert done.stdout == "[]\n"


def test_every_option_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accelerate_launch.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(documented) == {field.name for field in dataclasses.fields(CheckpointConfig)}
