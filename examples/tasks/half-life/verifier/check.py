"""Scores /app/answer.json: three checks, each a third of the reward."""

import csv
import json
import math
from pathlib import Path

TRUE_HALF_LIFE = 74.2
STATISTICAL_ERROR = 1.1
"""Standard deviation of a maximum-likelihood fit to these data, in seconds."""

HERE = Path(__file__).parent
ANSWER = Path("/app/answer.json")
REWARD = Path("/logs/verifier/reward.json")


def main():
    half_life, uncertainty, n0 = read_answer()
    checks = {
        "close_enough": abs(half_life - TRUE_HALF_LIFE) <= 0.05 * TRUE_HALF_LIFE,
        "plausible_uncertainty": STATISTICAL_ERROR / 10 <= uncertainty <= STATISTICAL_ERROR * 10,
        "consistent": fits_the_data(half_life, n0),
    }
    reward = sum(checks.values()) / len(checks)
    REWARD.write_text(json.dumps({"reward": reward, **{name: float(ok) for name, ok in checks.items()}}))
    words = ", ".join(f"{name} {'pass' if ok else 'fail'}" for name, ok in checks.items())
    print(f"reward {round(reward, 3)}: {words}")


def read_answer():
    """The three numbers; NaN, which passes no check, for whatever is missing or no number."""
    try:
        answer = json.loads(ANSWER.read_text()) if ANSWER.is_file() else {}
    except (OSError, ValueError, RecursionError):
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    numbers = [answer.get(name) for name in ("half_life_s", "uncertainty_s", "n0")]
    return [float(n) if type(n) in (int, float) and abs(n) < 1e9 else math.nan for n in numbers]


def fits_the_data(half_life, n0):
    """True when the model curve leaves a reduced chi-square of at most 1.5."""
    if not (half_life > 0 and n0 > 0):
        return False
    with (HERE / "counts.csv").open() as handle:
        rows = [(float(row["time_s"]), int(row["counts"])) for row in csv.DictReader(handle)]
    before = [counts for time, counts in rows if time < 0]
    background = sum(before) / len(before)
    after = [(time, counts) for time, counts in rows if time >= 0]
    chi2 = 0.0
    for time, counts in after:
        expected = n0 * 2 ** (-time / half_life) + background
        chi2 += (counts - expected) ** 2 / expected
    return chi2 / (len(after) - 2) <= 1.5


main()
