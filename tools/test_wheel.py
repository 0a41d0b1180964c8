"""Build the wheel, install it into an empty environment, and run tests there, without the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ckpt_core", "ckpt_async", "lightning_ckpt", "accelerate_ckpt")
TORCH = "torch==2.13.0"
#: Tests that do not read the sources.
TESTS = ("tests/ckpt_core", "tests/ckpt_async", "tests/attacks", "tests/test_public_names.py")
PLUGINS = ("tests/lightning_ckpt/test_packages.py", "tests/accelerate_ckpt/test_attach.py")
PURE = "not process and not server and not slow"


def main(arguments: list[str]) -> int:
    """Build, install and test the wheel; ``arguments`` go to pytest."""
    with tempfile.TemporaryDirectory(prefix="ckpt-wheel-") as folder:
        sources, tree, environment = Path(folder, "sources"), Path(folder, "tree"), Path(folder, "environment")
        for name in _tracked():
            is_package = name.parts[0] in PACKAGES
            targets = [sources] if is_package else [sources, tree]
            for target in targets:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target / name)
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources)
        shutil.rmtree(sources)
        (wheel,) = Path(folder).glob("*.whl")
        _run(sys.executable, "-m", "venv", environment)
        python = environment / "bin" / "python"
        install = (python, "-m", "pip", "install", "--quiet", "--quiet", "--constraint", tree / "constraints.txt")
        _run(*install, TORCH)
        _run(*install, f"{wheel}[test]")
        where = "import ckpt_core, sys; print(ckpt_core.__file__)"
        found = subprocess.run([python, "-c", where], cwd=tree, check=True, capture_output=True, text=True).stdout
        if not found.startswith(str(environment)):
            print(f"ckpt_core is imported from {found.strip()}, and not from the wheel", file=sys.stderr)
            return 1
        pytest = (python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-m", PURE, *TESTS, *PLUGINS)
        return subprocess.run([*pytest, *arguments], cwd=tree, check=False).returncode


def _tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [Path(name) for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
