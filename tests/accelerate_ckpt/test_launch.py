"""A launched script does not notice the plugin: compared with plain Python, in one process and in two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import accelerate_ckpt
from tests.support.accelerate_ranks import LAUNCHER
from tests.support.fork_server import ACCELERATE as MODULES

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]
ACCELERATE = Path(sysconfig.get_path("scripts")) / "accelerate"
ONE_PROCESS = ("--cpu", "--num_processes", "1")
# With this variable, Accelerate's launcher for GPUs starts gloo processes on the CPU.
TWO_PROCESSES = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")
TWO_PROCESSES_ENV = {"ACCELERATE_USE_CPU": "true"}
OURS = "accelerate_ckpt"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python ...`` in the test's directory: with ``-m accelerate_ckpt`` first, or without."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)

    return run


@pytest.fixture(autouse=True)
def _project_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(accelerate_ckpt.__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


FACTS = """
import json, sys

class Kept:
    number: int = 3

def facts():
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "path": sys.path,
        "file": __file__,
        "name": __name__,
        "spec": getattr(__spec__, "name", None),
        "package": __package__,
        "loader": type(__loader__).__name__,
        "cached": __cached__,
        "builtins": type(__builtins__).__name__,
        "names": sorted(globals()),
        "annotation": repr(Kept.__annotations__["number"]),
        "main is this module": main.__dict__ is globals(),
        "class is found": main.Kept is Kept and Kept.__module__ == "__main__",
        "nothing heavy is imported": "torch" not in sys.modules and "accelerate" not in sys.modules,
    }
"""


@pytest.mark.parametrize("words", [(), ("--strategy", "x", "--", "-m", "--", "--help")])
def test_a_script_sees_what_it_would_see_without_us(plain: RunScript, tmp_path: Path, words: tuple[str, ...]) -> None:
    write(tmp_path / "folder/sibling.py", "found = True")
    script = write(tmp_path / "folder/train.py", f"{FACTS}\nimport sibling\nprint(json.dumps(facts()))")
    link = tmp_path / "link.py"
    link.symlink_to(script)
    for name in ("folder/train.py", str(script), "link.py"):
        expected, found = plain(name, *words), plain("-m", OURS, "--strategy", "sync", name, *words)
        assert found.stderr == expected.stderr == ""
        facts = json.loads(found.stdout)
        assert facts == json.loads(expected.stdout)
        assert facts["argv"] == [name, *words] and facts["path"][0] == str(script.parent)
        assert facts["main is this module"] and facts["class is found"] and facts["nothing heavy is imported"]


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_sees_what_it_would_see_without_us(plain: RunScript, tmp_path: Path, name: str) -> None:
    write(tmp_path / "package/__init__.py", "")
    write(tmp_path / "package/sibling.py", "found = True")
    for file in ("train", "__main__"):
        write(tmp_path / f"package/{file}.py", f"{FACTS}\nfrom . import sibling\nprint(json.dumps(facts()))")
    expected, found = plain("-m", name, "-m", "x"), plain("-m", OURS, "-m", name, "-m", "x")
    assert found.stderr == expected.stderr == ""
    assert json.loads(found.stdout) == json.loads(expected.stdout)
    assert json.loads(found.stdout)["spec"] == ("package.train" if name == "package.train" else "package.__main__")


@pytest.mark.sampled(3)
@pytest.mark.extended_cells("chain", "exit text", "exit", "base")
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("def inner():\n    raise RuntimeError('no data')\ninner()", id="error"),
        pytest.param("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e", id="chain"),
        pytest.param("def broken(:\n    pass", id="syntax"),
        pytest.param("import sibling_with_error", id="import"),
        pytest.param("import no_such_module", id="no module"),
        pytest.param("raise KeyboardInterrupt", id="interrupt"),
        pytest.param("import sys\nsys.exit(7)", id="exit 7"),
        pytest.param("import sys\nsys.exit('gave up')", id="exit text"),
        pytest.param("import sys\nsys.exit()", id="exit"),
        pytest.param("raise BaseException('odd')", id="base"),
        pytest.param(
            "import sys, traceback\nsys.excepthook = lambda *e: print('hooked', traceback.extract_tb(e[2]))\n1 / 0",
            id="hook",
        ),
        pytest.param(
            "import atexit, sys\natexit.register(lambda: print(sys.modules['__main__'].atexit.__name__))\n1 / 0",
            id="atexit",
        ),
    ],
)
def test_the_end_of_a_script_is_its_own(plain: RunScript, tmp_path: Path, source: str) -> None:
    write(tmp_path / "sibling_with_error.py", "value = {}['missing']")
    write(tmp_path / "train.py", source)
    expected, found = plain("train.py"), plain("-m", OURS, "train.py")
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)
    assert expected.returncode != 0 or source.endswith("sys.exit()")


@pytest.mark.extended
def test_a_line_about_a_run_ends_no_script_and_is_not_in_its_output(plain: RunScript, tmp_path: Path) -> None:
    script = """
        import os, sys
        import torch
        from accelerate import Accelerator

        for end in ("sys.stderr.close()", "sys.stderr = None", "os.close(2)"):
            child = os.fork()  # each of which ends as the script does
            if not child:
                break
            print("status", os.waitpid(child, 0)[1], flush=True)
        else:
            sys.exit()
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.save_state(f"saved by {end}")
        print(end, flush=True)
        exec(end)
    """
    write(tmp_path / "train.py", script)
    found = plain("-m", OURS, "--strategy", "sync", "train.py")
    ends = ["sys.stderr.close()", "sys.stderr = None", "os.close(2)"]
    assert found.stdout.splitlines() == [line for end in ends for line in (end, "status 0")], found.stderr
    assert all((tmp_path / f"saved by {end}" / "manifest.json").exists() for end in ends)


def test_the_traceback_of_a_module_begins_in_the_module(plain: RunScript, tmp_path: Path) -> None:
    write(tmp_path / "package/__init__.py", "")
    train = write(tmp_path / "package/train.py", "1 / 0")
    found = plain("-m", OURS, "-m", "package.train")
    assert found.returncode == 1
    assert re.findall(r'File "(.+?)"', found.stderr) == [str(train)]


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (("--strategy", "asinc", "train.py"), 2, "--strategy: strategy must be one of 'sync', 'async', 'sharded', not"),
        (("--stratgy", "sync", "train.py"), 2, "--stratgy: there is no such option; did you mean '--strategy'?"),
        (("--strat", "sync", "train.py"), 2, "--strat: there is no such option; did you mean '--strategy'?"),
        (("--config", "missing.yaml", "train.py"), 2, "--config: missing.yaml cannot be read"),
        (("--strategy", "sync"), 2, "the following arguments are required: script"),
        (("missing.py",), 2, "missing.py: there is no such file"),
        (("-m", "missing.train"), 1, "there is no module 'missing.train' that can be run"),
        (("-m", "xml"), 1, "there is no module 'xml' that can be run"),
        (("-m", "math"), 1, "there is no module 'math' that can be run"),
    ],
)
def test_what_cannot_be_run_is_named(
    plain: RunScript, tmp_path: Path, words: tuple[str, ...], status: int, error: str
) -> None:
    write(tmp_path / "train.py", "print('ran')")
    found = plain("-m", OURS, *words)
    assert (found.returncode, found.stdout) == (status, "")
    assert error in found.stderr and "Traceback" not in found.stderr


def test_a_module_that_misses_a_module_is_not_called_missing_itself(plain: RunScript, tmp_path: Path) -> None:
    write(tmp_path / "package/__init__.py", "import no_such_module")
    write(tmp_path / "package/train.py", "")
    found = plain("-m", OURS, "-m", "package.train")
    assert found.returncode == 1 and "No module named 'no_such_module'" in found.stderr.splitlines()[-1]


def test_options_are_taken_with_hyphens_too(plain: RunScript, tmp_path: Path) -> None:
    write(tmp_path / "train.py", "print('ran')")
    assert plain("-m", OURS, "--max-pending", "2", "--on_error=warn", "train.py").stdout == "ran\n"
    refused = plain("-m", OURS, "--max-pending", "0", "train.py")
    assert refused.returncode == 2 and "--max_pending: max_pending must be a whole number" in refused.stderr


@pytest.mark.slow
def test_a_spawned_worker_finds_the_scripts_classes(run_script: RunScript, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import pickle
        import torch
        from accelerate import Accelerator
        from sibling import OFFSET

        class Squares(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return torch.tensor(index * index + OFFSET), torch.utils.data.get_worker_info().id

        if __name__ == "__main__":
            accelerator = Accelerator()
            loader = torch.utils.data.DataLoader(
                Squares(), batch_size=2, num_workers=2, multiprocessing_context="spawn"
            )
            batches = [(values.tolist(), workers.tolist()) for values, workers in accelerator.prepare(loader)]
            print([value for values, _ in batches for value in values], {w for _, workers in batches for w in workers})
            print(type(pickle.loads(pickle.dumps(Squares()))) is Squares, hasattr(accelerator.save_state, "__wrapped__"))
        """,
    )
    write(tmp_path / "sibling.py", "OFFSET = 100")
    found = run_script(ACCELERATE, "launch", *ONE_PROCESS, "-m", OURS, "train.py")
    assert found.stdout.splitlines()[0] == "[100, 101, 104, 109, 116, 125, 136, 149] {0, 1}"
    assert found.stdout.splitlines()[1] == "True True"


def test_a_worker_spawned_by_a_module_finds_its_functions(plain: RunScript, tmp_path: Path) -> None:
    write(tmp_path / "package/__init__.py", "")
    write(tmp_path / "package/sibling.py", "OFFSET = 100")
    write(
        tmp_path / "package/train.py",
        """
        import multiprocessing
        from .sibling import OFFSET

        def shifted(number):
            return number + OFFSET

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print(pool.map(shifted, range(3)))
        """,
    )
    assert plain("-m", OURS, "-m", "package.train").stdout == "[100, 101, 102]\n"


@pytest.mark.extended
def test_variables_that_the_script_sets_before_its_imports_count(plain: RunScript, tmp_path: Path) -> None:
    write(
        tmp_path / "train.py",
        """
        import importlib.util, os
        os.environ["HF_HOME"] = "/where/the/script/wants/it"
        os.environ["OMP_NUM_THREADS"] = "2"
        assert importlib.util.find_spec("accelerate") is not None  # as transformers does before it imports it
        from accelerate.utils import set_seed
        from accelerate import Accelerator
        from huggingface_hub import constants
        import torch
        print(constants.HF_HOME, torch.get_num_threads(), hasattr(Accelerator.save_state, '__wrapped__'))
        """,
    )
    assert plain("-m", OURS, "train.py").stdout.split() == ["/where/the/script/wants/it", "2", "True"]


def test_two_processes(fork_script: RunScript, tmp_path: Path) -> None:
    write(tmp_path / "package/__init__.py", "")
    write(
        tmp_path / "package/train.py",
        """
        import json, pathlib, sys
        from accelerate import Accelerator

        accelerator = Accelerator()
        seen = [accelerator.num_processes, sys.argv[1:], hasattr(accelerator.save_state, "__wrapped__")]
        pathlib.Path(f"rank-{accelerator.process_index}.json").write_text(json.dumps(seen))
        accelerator.wait_for_everyone()
        if accelerator.process_index == 1:
            raise LookupError("only here")
        """,
    )
    found = fork_script(
        LAUNCHER,
        "launch",
        *TWO_PROCESSES,
        "-m",
        OURS,
        "--strategy=sharded",
        "-m",
        "package.train",
        "--lr=1",
        modules=MODULES,
        env=TWO_PROCESSES_ENV,
        check=False,
    )
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text()) == [2, ["--lr=1"], True]
    assert found.returncode != 0 and "LookupError: only here" in found.stderr
    first, _ = found.stderr.split("LookupError: only here")
    assert re.findall(r'File "(.+?)"', first)[-1] == str(tmp_path / "package/train.py")
    assert "accelerate_ckpt/" not in first


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "first", ["from accelerate_ckpt._attach import install", "from accelerate_ckpt import attach", ""]
)
def test_attach_is_the_function_whatever_was_imported_first(fork_script: RunScript, first: str) -> None:
    done = fork_script(f"{first}\nimport accelerate_ckpt\nprint(type(accelerate_ckpt.attach).__name__)")
    assert done.stdout == "function\n"


@pytest.mark.extended
def test_a_trainer_that_keeps_its_own_checkpoints_is_warned_about_once(plain: RunScript, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = """
        import os, sys, torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        class Own(Trainer):
            pass
        texts = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 32
        for kind, callback in ((Trainer, True), (Own, False), (Trainer, False)):
            print("trainer", kind.__name__, callback, file=sys.stderr, flush=True)
            sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=16, **sizes))
            directory = f"{sys.argv[1]}/{kind.__name__}-{callback}"
            options = {"max_steps": 2, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
            trainer = kind(model, TrainingArguments(directory, **options), train_dataset=texts)
            if callback:
                from accelerate_ckpt.integrations.transformers import ResumableCallback
                ResumableCallback(trainer)
            trainer.train()
            assert os.path.exists(f"{directory}/checkpoint-2/optimizer.pt") != callback
    """
    write(tmp_path / "train.py", source)
    done = plain("-m", OURS, "train.py", "runs")
    assert done.returncode == 0, done.stderr
    ours, own, stock = re.split(r"^trainer .*\n", done.stderr, flags=re.MULTILINE)[1:]
    assert "saves its own checkpoints" not in ours + stock
    assert own.count("saves its own checkpoints, which accelerate_ckpt leaves alone") == 1
    assert "callbacks=[accelerate_ckpt.integrations.transformers.ResumableCallback()]" in own
