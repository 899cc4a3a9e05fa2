"""Scores /app/report.json: each right answer is a quarter of the reward."""

import json
from pathlib import Path

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
REPORT = Path("/app/report.json")
REWARD = Path("/logs/verifier/reward.txt")


def read_report():
    try:
        report = json.loads(REPORT.read_text()) if REPORT.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def right(name, answer):
    expected = EXPECTED[name]
    if name == "revenue":
        return type(answer) in (int, float) and abs(answer - expected) < 0.005
    return answer == expected


report = read_report()
verdicts = {name: right(name, report.get(name)) for name in EXPECTED}
reward = sum(verdicts.values()) / len(verdicts)
print(f"reward {reward}: " + ", ".join(f"{name} {'pass' if ok else 'fail'}" for name, ok in verdicts.items()))
REWARD.write_text(f"{reward}\n")
