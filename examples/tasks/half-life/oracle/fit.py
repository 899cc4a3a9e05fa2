"""Least squares with Poisson weights, by Gauss-Newton steps in (n0, decay constant)."""

import csv
import json
import math
from pathlib import Path

with Path("/app/counts.csv").open() as handle:
    rows = [(float(row["time_s"]), int(row["counts"])) for row in csv.DictReader(handle)]
before = [counts for time, counts in rows if time < 0]
after = [(time, counts) for time, counts in rows if time >= 0]
background = sum(before) / len(before)

n0, decay = after[0][1] - background, math.log(2) / 60
for _ in range(50):
    aa = ab = bb = ra = rb = 0.0
    for time, counts in after:
        shape = math.exp(-decay * time)
        expected = n0 * shape + background
        by_n0, by_decay = shape, -n0 * time * shape
        aa += by_n0 * by_n0 / expected
        ab += by_n0 * by_decay / expected
        bb += by_decay * by_decay / expected
        ra += by_n0 * (counts - expected) / expected
        rb += by_decay * (counts - expected) / expected
    determinant = aa * bb - ab * ab
    n0 += (bb * ra - ab * rb) / determinant
    decay += (aa * rb - ab * ra) / determinant

half_life = math.log(2) / decay
uncertainty = half_life / decay * math.sqrt(aa / determinant)
answer = {"half_life_s": round(half_life, 2), "uncertainty_s": round(uncertainty, 2), "n0": round(n0, 1)}
Path("/app/answer.json").write_text(json.dumps(answer) + "\n")
print(answer)
