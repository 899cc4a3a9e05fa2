"""Size of a plain install: packages and megabytes in a fresh virtual environment.

python benchmarks/install.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_PACKAGES, MAX_MB = 45, 150


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder, "bin", "python")), "-m", "pip", "--disable-pip-version-check"]
        own = len(installed(pip))
        before = megabytes(Path(folder))
        wanted = ["-q", "--no-warn-script-location", "-c", str(ROOT / "constraints.txt"), str(ROOT)]
        subprocess.run([*pip, "install", *wanted], check=True)
        packages, size = len(installed(pip)) - own, megabytes(Path(folder)) - before
    print(f"{'packages of a plain install':44} {packages:>10}      budget <= {MAX_PACKAGES}")
    print(f"{'megabytes of a plain install':44} {size:>10.0f}      budget <= {MAX_MB}")
    return 0 if packages <= MAX_PACKAGES and size <= MAX_MB else 1


def installed(pip: list[str]) -> list[str]:
    return subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout.splitlines()


def megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
