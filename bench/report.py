"""Options, percentiles, table and bars, as all benchmarks share them."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a benchmark.

    value, reference: in ``unit``, both from this run. ratio: value / reference. bar: the ratio, or the value where
    ``bar_on`` is ``value``, must not exceed it; None means the row only informs.
    """

    name: str
    unit: str
    value: float
    reference: float | None = None
    reference_name: str = ""
    bar: float | None = None
    bar_on: str = "ratio"
    at_least: bool = False

    @property
    def ratio(self) -> float | None:
        """Return value / reference, or None without a reference."""
        return None if not self.reference else self.value / self.reference

    @property
    def judged(self) -> float | None:
        """Return the number the bar is held against."""
        return self.value if self.bar_on == "value" else self.ratio

    @property
    def missed(self) -> bool:
        """Tell whether the row has a bar and misses it."""
        if self.bar is None or self.judged is None:
            return False
        return self.judged < self.bar if self.at_least else self.judged > self.bar


def parse_arguments(description: str, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parse the options all benchmarks share; pass a parser that already has the benchmark's own."""
    parser = parser or argparse.ArgumentParser()
    parser.description = description
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser.parse_args()


def finish(title: str, rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the rows and return the exit status: 1 with ``--check`` when a bar is missed."""
    missed = [row for row in rows if row.missed]
    if options.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio, "missed": row.missed} for row in rows], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(_table(title, rows))
    for row in missed:
        print(f"missed: {row.name}: {row.judged:.3f}, bar {row.bar:g} ({row.bar_on})")
    if options.check and not missed:
        print("all bars met: " + "; ".join(f"{row.name} {row.judged:.3f}" for row in rows if row.bar is not None))
    return 1 if options.check and missed else 0


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    for heading in ("figure", "unit", "value", "reference", "ratio", "bar"):
        table.add_column(heading, justify="left" if heading in ("figure", "unit") else "right")
    for row in rows:
        reference = "" if row.reference is None else f"{row.reference:.3f} {row.reference_name}".strip()
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        sign = ">=" if row.at_least else "<="
        bar = "" if row.bar is None else f"{sign} {row.bar:g} ({row.bar_on})"
        style = "red" if row.missed else None
        table.add_row(row.name, row.unit, f"{row.value:.3f}", reference, ratio, bar, style=style)
    return table


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile of some values."""
    return sorted(values)[max(0, round(len(values) * 0.99) - 1)]


def in_ms(seconds: Sequence[float]) -> list[float]:
    """Return milliseconds."""
    return [value * 1000 for value in seconds]
