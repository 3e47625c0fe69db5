"""`subcaps bench polar`: `polar`, forward and backward, beside what else one would use, on the shapes of the layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from subcaps.bench import polar_figure, polar_table
from subcaps.bench.polar_rows import PRODUCTS, SEED, Row, Shape, bench
from subcaps.bench.timing import Timing, copy_rate, matmul_rate
from subcaps.measure.records import Origin, Record, origin, short_name, write


class Effort(NamedTuple):
    """What is timed, and for how long."""

    shapes: Sequence[Shape]
    growth: Sequence[tuple[str, Sequence[Shape]]]  # along n, d and c
    rounds: int
    seconds: float  # of a method at a shape
    compiled: bool


BASE = Shape(32, 1152, 8)

FULL = Effort(
    shapes=(
        Shape(64, 1152, 2, "SVHN conv"),
        Shape(256, 4608, 2, "ResNet-34 conv"),
        Shape(1000, 512, 4, "ResNet-34 fc"),
        Shape(32, 576, 2, "ResNet-110 conv"),
        Shape(8, 1152, 16, "no layer of the paper"),
        Shape(8, 4608, 64, "ProgGAN"),
        Shape(4, 4608, 128, "ProgGAN"),
        Shape(10, 100, 16, "MNIST generator"),
        Shape(8, 225, 16, "MNIST"),
        Shape(8, 1152, 8, "MNIST"),
        Shape(8, 576, 8, "MNIST"),
    ),
    growth=(
        ("n", [BASE._replace(n=n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]),
        ("d", [BASE._replace(d=d) for d in (36, 72, 144, 288, 576, 1152, 2304, 4608)]),
        ("c", [BASE._replace(c=c) for c in (1, 2, 4, 8, 16, 32, 64, 128)]),
    ),
    rounds=30,
    seconds=1.0,
    compiled=True,
)

QUICK = Effort(
    shapes=(Shape(3, 18, 2, "quick"), Shape(2, 12, 4, "quick")),
    growth=(
        ("n", [Shape(1, 12, 2), Shape(2, 12, 2)]),
        ("d", [Shape(2, 12, 2), Shape(2, 18, 2)]),
        ("c", [Shape(2, 12, 2)]),
    ),
    rounds=2,
    seconds=0.01,
    compiled=False,
)


def run(on: Literal["cpu", "cuda"] = "cpu", out: str | None = None, quick: bool = False) -> None:
    """Times everything, prints a table for each shape and a summary, and writes the records and a figure."""
    if on == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"bench polar: torch {torch.__version__} finds no CUDA device here; leave out --device cuda")
    device, effort = torch.device(on), QUICK if quick else FULL
    place = short_name(device)
    source = origin(" ".join(["subcaps bench polar", *["--device cuda"] * (on == "cuda"), *["--quick"] * quick]), device)
    print(f"{source['hardware']}, torch {source['torch']}, commit {source['commit'] or 'unknown'}, {_load()}")
    print("Forward + backward in float32, medians; errors against float64. In bounds: the polar factor and its gradient;")
    print("other orthonormal maps are listed, not bounded.\n")

    peak = matmul_rate(device, effort.rounds, side=2048 if on == "cpu" else 8192)
    bandwidth = copy_rate(device, effort.rounds, megabytes=256 if on == "cpu" else 1024)
    records = {
        record.name: record
        for record in (
            _record(f"projection matmul float32 {place}", peak, "GFLOP/s", "higher", source),
            _record(f"projection copy float32 {place}", bandwidth, "GB/s", "higher", source),
        )
    }
    results = {}
    for shape in effort.shapes:
        results[shape] = bench(shape, device, effort.rounds, effort.seconds, effort.compiled)
        records |= _records(shape, results[shape], place, source)
        print(polar_table.of_shape(shape, results[shape]), "\n", flush=True)
    for mode in next(iter(results.values()))["auto"].timings:
        print(polar_table.summary(results, mode, peak, bandwidth), "\n", flush=True)

    panels = []
    for letter, shapes in effort.growth:
        rows = [bench(shape, device, effort.rounds, effort.seconds, only=("paper", "auto")) for shape in shapes]
        panels.append(_panel(letter, shapes, rows))
        for shape, row in zip(shapes, rows, strict=True):
            records = _records(shape, row, place, source) | records  # a shape of the tables stays as it is there
    if quick and out is None:
        print("--quick writes nothing without --out")
        return
    path = Path(out or f"results/bench/polar-{place.replace(' ', '-')}.json")
    write(path, records.values())
    print(f"{len(records)} records: {path}")
    _draw(panels, f"The projection on {source['hardware']}, float32", path.with_suffix(".png"))


def _draw(panels: Sequence[polar_figure.Panel], title: str, path: Path) -> None:
    try:
        polar_figure.draw(panels, title, path)
        print(f"how the cost grows: {path}")
    except ModuleNotFoundError:
        print("no figure, since matplotlib is not installed: pip install 'PATH/TO/CLONE[train]'")


def _load() -> str:
    return f"load before the start {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"


def _records(shape: Shape, rows: dict[str, Row], place: str, source: Origin) -> dict[str, Record]:
    records = []
    for method, row in rows.items():
        name = f"projection {shape} {method} {place}"
        if not row.timings:
            records.append(Record(name=name, ours=None, unit="ms", better="lower"))
        for mode, timing in row.timings.items():
            records.append(_record(f"{name} {mode}".strip(), timing, "ms", "lower", source))
    return {record.name: record for record in records}


def _record(name: str, timing: Timing, unit: str, better: Literal["lower", "higher"], source: Origin) -> Record:
    return Record(
        name=name,
        ours=_short(timing.median),
        std=timing.std and _short(timing.std),
        values=tuple(map(_short, timing.values)),
        seeds=(SEED,),
        unit=unit,
        better=better,
        wall_s=_short(timing.wall_s),
        **source,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _panel(letter: str, shapes: Sequence[Shape], rows: Sequence[dict[str, Row]]) -> polar_figure.Panel:
    mode = list(rows[0]["auto"].timings)[-1]  # on CUDA as a graph
    ms = {method: [row[method].timings[mode].median for row in rows] for method in ("paper", "auto", PRODUCTS)}
    fixed = ", ".join(f"{other} = {getattr(shapes[0], other)}" for other in "ndc" if other != letter)
    labels = {"n": "n, types", "d": "d, dimensions of the space", "c": "c, dimensions of a capsule"}
    return polar_figure.Panel(labels[letter], fixed, [getattr(shape, letter) for shape in shapes], ms)
