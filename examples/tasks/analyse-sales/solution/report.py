import csv
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path

with Path("/app/sales.csv").open() as handle:
    sales = dict.fromkeys(tuple(row.values()) for row in csv.DictReader(handle))

revenue, by_product, by_month, units = Decimal(0), Counter(), Counter(), Counter()
for date, product, quantity, unit_price, status in sales:
    if status != "paid":
        continue
    product, worth = product.strip().lower(), int(quantity) * Decimal(unit_price)
    revenue += worth
    by_product[product] += worth
    by_month[date[:7]] += worth
    units[product] += int(quantity)

report = {
    "revenue": float(revenue),
    "best_product": by_product.most_common(1)[0][0],
    "best_month": by_month.most_common(1)[0][0],
    "units": dict(sorted(units.items())),
}
Path("/app/report.json").write_text(json.dumps(report) + "\n")
print(report)
