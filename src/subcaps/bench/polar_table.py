"""The tables of `subcaps bench polar`: a shape's methods, and how all shapes stand against what is aimed at."""

from __future__ import annotations

import math
from collections.abc import Mapping

from subcaps.bench.polar_rows import ILL_CONDITIONED, PRODUCTS, Row, Shape
from subcaps.bench.timing import Timing
from subcaps.measure.records import markdown, number

Rows = Mapping[str, Row]


def of_shape(shape: Shape, rows: Rows) -> str:
    """All methods, the fastest first."""
    modes = list(rows["auto"].timings)

    def milliseconds(name: str) -> float:
        return _ms(rows, name, modes[0]) or math.inf

    def cells(name: str) -> list[str]:
        row = rows[name]
        times = [number(_ms(rows, name, mode)) for mode in modes]
        errors = [f"{error:.0e}" for error in row.errors] if row.errors else ["", "", ""]
        bounds = row.note or ("" if not row.errors else "yes" if row.is_polar else "no")
        return [name, *times, _times(milliseconds(name), milliseconds("auto")), *errors, bounds]

    header = (
        "method",
        *(f"ms {mode}".strip() for mode in modes),
        "times auto",
        "Q^T Q - I",
        "Q",
        "gradient",
        "in bounds",
    )
    table = markdown(header, [cells(name) for name in sorted(rows, key=milliseconds)])
    return f"{shape.n} x {shape.d} x {shape.c}, {shape.layer}\n\n{table}"


def summary(results: Mapping[Shape, Rows], mode: str, peak: Timing, bandwidth: Timing) -> str:
    """What is aimed at: faster than the paper's method at its best, and no slower than any other method as exact."""
    against_paper = markdown(
        ("shape", f"auto ms {mode}".strip(), "paper", "paper compiled", "times faster than the best", "aim", ""),
        [_against_paper(shape, rows, mode) for shape, rows in results.items()],
    )
    against_others = markdown(
        (
            "shape",
            "memory floor ms",
            "five products",
            "GFLOP/s",
            "auto / products",
            "fastest other in bounds",
            "ms",
            "",
        ),
        [_against_others(shape, rows, mode, bandwidth) for shape, rows in results.items()],
    )
    machine = f"{number(peak.median)} GFLOP/s in a large matrix product, {number(bandwidth.median)} GB/s in a large copy"
    return f"{against_paper}\n\nThe machine: {machine}\n\n{against_others}"


def _against_paper(shape: Shape, rows: Rows, mode: str) -> list[str]:
    auto, eager, compiled = (_ms(rows, name, mode) for name in ("auto", "paper", "paper compiled"))
    best = min(ms for ms in (eager, compiled, math.inf) if ms)
    cells = [str(shape), number(auto), number(eager), number(compiled), _times(best, auto)]
    if auto is None or mode == "eager":
        return [*cells, "", ""]
    if mode == "graph":
        aim = 0.03 if shape.c <= 4 else 0.06 if shape.c <= 16 else 0.3 if shape.c <= 64 else 0.5
        return [*cells, f"{aim} ms", _verdict(auto <= aim)]
    aim = 5 if shape.c <= 4 else 3 if shape.c <= 16 else 1.3
    if shape.layer.startswith("ResNet-34"):
        aim = 2.5  # tall products are most of it
    return [*cells, f"{aim}", _verdict(best >= aim * auto)]


def _against_others(shape: Shape, rows: Rows, mode: str, bandwidth: Timing) -> list[str]:
    n, d, c, _ = shape
    auto, products = _ms(rows, "auto", mode), _ms(rows, PRODUCTS, mode)
    floor = 5 * 4 * n * d * c / bandwidth.median / 1e6  # W, Q, then G, Q and dW: each number once
    flops = 5 * 2 * n * d * c * c
    cells = [
        str(shape),
        number(floor),
        number(products),
        number(products and flops / products / 1e6),
        _times(auto, products),
    ]
    exact = {name: ms for name, row in rows.items() if row.is_polar and (ms := _ms(rows, name, mode))}
    # what has auto's very errors is auto: timed again, or called by its engine's name. How far they differ is noise
    same = [ms for name, ms in exact.items() if rows[name].errors == rows["auto"].errors]
    others = {name: ms for name, ms in exact.items() if ms not in same and name != ILL_CONDITIONED}
    if not (auto and others):
        return [*cells, "", "", ""]
    fastest = min(others, key=lambda name: others[name])
    noise = max(1.05, max(same) / min(same))
    return [*cells, fastest, number(others[fastest]), _verdict(auto <= noise * others[fastest])]


def _ms(rows: Rows, name: str, mode: str) -> float | None:
    timing = rows[name].timings.get(mode) if name in rows else None
    return timing.median if timing else None


def _times(ms: float | None, of: float | None) -> str:
    return number(ms / of) if ms and of and math.isfinite(ms) else ""


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
