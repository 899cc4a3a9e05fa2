"""CPU time of `import benchflow` and of `bench --help`, over that of bare Python.

    python benchmarks/cli.py [--repeat 15]

Each line is the median of processes started one after another, the variants in turn, so
that all of them meet the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

VARIANTS = {
    "bare python": ["-c", "pass"],
    "import benchflow": ["-c", "import benchflow"],
    "bench --help": ["-m", "benchflow.cli.main", "--help"],
    "bench run --help": ["-m", "benchflow.cli.main", "run", "--help"],
}
BUDGET_MS = {"import benchflow": 60, "bench --help": 150}


def cpu_ms(arguments: list[str]) -> float:
    """User and system time of one process, in milliseconds."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return 1000 * (usage.ru_utime + usage.ru_stime)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    for arguments in VARIANTS.values():
        cpu_ms(arguments)  # byte code is compiled once, outside the measurement
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(repeat):
        for name, arguments in VARIANTS.items():
            taken[name].append(cpu_ms(arguments))
    bare = statistics.median(taken["bare python"])
    missed = 0
    for name, values in taken.items():
        over = statistics.median(values) - bare
        budget = BUDGET_MS.get(name)
        verdict = "" if budget is None else f"budget {budget} ms  {'ok' if over <= budget else 'MISSED'}"
        missed += budget is not None and over > budget
        print(
            f"{name:20}  {statistics.median(values):7.1f} ms CPU  {over:+7.1f} over bare  {verdict}".rstrip()
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
