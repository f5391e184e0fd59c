"""Throughput of the engine beside what transformers itself brings, on the same model in the same run.

Equal requests against a bare forward loop with a static batch, which wastes nothing; mixed ones against padded
``generate`` and the library's own continuous batching; and the parts of a step's time. Rounds of both sides
alternate, figures are medians. Two threads on two cores collapse as soon as anything else runs: the first row shows
what did.
"""

import argparse
import logging
import statistics
from collections.abc import Iterator

import psutil
import torch
from rich.console import Console
from rich.progress import Progress

from bench.engine_sides import PADDED_BATCH, Cost, Load, ShoalEngine, TransformersModel, equal_load, measure, mixed_load
from bench.report import Row, finish, parse_arguments
from engine.model.placement import computes_natively

MODEL = "smollm2-135m"
BATCHES = (1, 8, 32)
MIN_THROUGHPUT_RATIO = 1.0
MIN_MIXED_RATIO = 1.7
MAX_OVERHEAD = 0.15

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_MAX_ROUNDS = 5
_ROUNDS_S = 60.0  # no further round of a batch size after so long
_OTHERS_S = 1.0
_BUSY = 0.1


def main() -> int:
    """Measure and print; return the exit status."""
    options = _parse()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dtype = _DTYPES[options.dtype]
    console = Console(stderr=True)
    rows = [_others(console)]
    with Progress(console=console, transient=True) as progress:
        rows += _measure_equal(dtype, options, progress)
        rows += _measure_mixed(_mixed_dtype(dtype, console), options, progress)
    title = f"bench.engine: {MODEL}, {options.dtype}, {options.threads} threads"
    return finish(title, rows, options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="number format of the model (default: bf16)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each side (default: 2)")
    parser.add_argument("--quick", action="store_true", help="one short round each: the shape of things, not a figure")
    return parse_arguments(__doc__ or "", parser)


def _others(console: Console) -> Row:
    """Return how busy the machine is before the run."""
    cores = psutil.cpu_percent(interval=_OTHERS_S) / 100 * (psutil.cpu_count() or 1)
    if cores > _BUSY:
        console.print(f"warning: something else uses {cores:.2f} cores; the figures will be off", style="yellow")
    return Row("used by others before the run", "cores", cores)


def _mixed_dtype(dtype: str, console: Console) -> str:
    """Return the format for the mixed load: without the instructions for it the references would take an hour."""
    if computes_natively(torch.device("cpu"), getattr(torch, dtype)):
        return dtype
    console.print(f"this CPU has no {dtype} instructions: the mixed load is measured in float32", style="yellow")
    return "float32"


# --- requests of one length ---------------------------------------------------------------------------------------


def _measure_equal(dtype: str, options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    num_tokens = 16 if options.quick else 64
    task = progress.add_task("loading", total=len(BATCHES) + 1)
    engine = ShoalEngine(MODEL, dtype, options.threads)
    reference = TransformersModel(MODEL, dtype, options.threads)
    warm_up = equal_load(2, 8, 2)
    engine.serve(warm_up)
    reference.loop_static_batch(warm_up)
    for batch in BATCHES:
        progress.update(task, description=f"batch {batch}", advance=1)
        load = equal_load(batch, num_tokens, num_tokens)
        yield from _batch_rows(batch, list(_rounds(engine, reference, load, options.quick)))
    progress.update(task, description="where a step goes", advance=1)
    yield from _split_rows(engine.split(equal_load(BATCHES[-1], num_tokens, num_tokens)), num_tokens - 2)
    engine.close()


def _rounds(engine: ShoalEngine, reference: TransformersModel, load: Load, quick: bool) -> Iterator[tuple[Cost, Cost]]:
    """Yield (ours, reference) of each round; which one goes first alternates."""
    spent_s = 0.0
    sides = [engine.serve, reference.loop_static_batch]
    for index in range(1 if quick else _MAX_ROUNDS):
        if spent_s > _ROUNDS_S:
            return
        order = (0, 1) if index % 2 == 0 else (1, 0)
        costs = {side: measure(sides[side], load) for side in order}
        spent_s += costs[0].wall_s + costs[1].wall_s
        yield costs[0], costs[1]


def _batch_rows(batch: int, rounds: list[tuple[Cost, Cost]]) -> Iterator[Row]:
    """Report medians; the ratio is that of the medians."""
    for unit, bar in (("tokens/s", MIN_THROUGHPUT_RATIO), ("tokens/CPU s", None)):
        ours, reference = (
            statistics.median(cost.tokens_per_s if bar else cost.tokens_per_cpu_s for cost in costs)
            for costs in zip(*rounds, strict=True)
        )
        name = f"batch {batch} ({len(rounds)} round{'s' if len(rounds) > 1 else ''})"
        yield Row(name, unit, ours, reference, "static loop", bar, at_least=True)


def _split_rows(seconds: dict[str, float], num_steps: int) -> Iterator[Row]:
    step_ms = seconds.pop("step") / num_steps * 1000
    overhead_ms = step_ms - seconds["forward"] / num_steps * 1000
    for part, part_s in seconds.items():
        yield Row(f"step at batch {BATCHES[-1]}: {part}", "ms", part_s / num_steps * 1000, step_ms, "whole step")
    yield Row(f"step at batch {BATCHES[-1]}: all but forward", "ms", overhead_ms, step_ms, "whole step", MAX_OVERHEAD)


# --- requests of mixed lengths ------------------------------------------------------------------------------------


def _measure_mixed(dtype: str, options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    load = mixed_load(8, 64, 32) if options.quick else mixed_load(64, 512, 256)
    task = progress.add_task("loading", total=4)
    engine = ShoalEngine(MODEL, dtype, options.threads)
    progress.update(task, description=f"{len(load.prompts)} mixed requests: Shoal", advance=1)
    ours = measure(engine.serve, load)
    engine.close()
    reference = TransformersModel(MODEL, dtype, options.threads)
    for name, run in (
        (f"generate, padded by {PADDED_BATCH}", reference.generate_padded),
        ("its continuous batching", reference.generate_continuously),
    ):
        progress.update(task, description=f"{len(load.prompts)} mixed requests: {name}", advance=1)
        yield from _mixed_rows(f"mixed, {dtype}", ours, measure(run, load), name)


def _mixed_rows(name: str, ours: Cost, reference: Cost, reference_name: str) -> Iterator[Row]:
    for unit, mine, theirs in (
        ("useful tokens/s", ours.tokens_per_s, reference.tokens_per_s),
        ("useful tokens/CPU s", ours.tokens_per_cpu_s, reference.tokens_per_cpu_s),
    ):
        yield Row(name, unit, mine, theirs, reference_name, MIN_MIXED_RATIO, at_least=True)


if __name__ == "__main__":
    raise SystemExit(main())
