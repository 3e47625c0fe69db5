"""The figure of `subcaps bench polar`: how the cost grows with n, d and c."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

STYLES = {
    "paper": ("the paper's 20 steps, autograd", "#d1603d", "o"),
    "auto": ("polar(W), auto", "#1f5fa8", "s"),
    "tall products": ("its five tall products alone", "#8a8a8a", "^"),
}


class Panel(NamedTuple):
    """Milliseconds by method, over one of n, d and c, the others fixed."""

    label: str
    fixed: str
    at: Sequence[int]
    ms: Mapping[str, Sequence[float]]


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """One log-log panel beside the other; `ModuleNotFoundError` where matplotlib is absent."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        for name, (label, color, marker) in STYLES.items():
            axes.plot(panel.at, panel.ms[name], color=color, marker=marker, markersize=5, linewidth=1.8, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(panel.at, [str(value) for value in panel.at])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_xlabel(panel.label)
        axes.set_title(panel.fixed, fontsize=10)
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("forward + backward, ms")
    figure.axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
