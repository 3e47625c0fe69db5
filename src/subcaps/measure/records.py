"""The one form of `results/*.json`, `{"records": [...]}`: a number and what one needs to get it again.

Each record carries its own origin, since the rows of a table come from different days and machines.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, TypedDict

import torch


class Origin(TypedDict):
    """Where a number comes from."""

    command: str
    commit: str | None
    hardware: str
    torch: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """One number.

    Args:
        name: lower-case words, unique in its file.
        ours: the number, the mean or median of `values`; None if this row was not run, which then has no origin either.
        std: the standard deviation of `values`.
        values: one per seed, or one per timing.
        seeds: those that were run.
        unit: such as "ms" or "error %".
        better: whether a lower or a higher number is better.
        paper: the paper's number.
        bound: a figure that must be met. An aim is no bound.
        command, commit, hardware, torch: see `origin`.
        wall_s: seconds that measuring this row took.
    """

    name: str
    ours: float | None
    std: float | None = None
    values: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    unit: str
    better: Literal["lower", "higher"]
    paper: float | None = None
    bound: float | None = None
    command: str | None = None
    commit: str | None = None
    hardware: str | None = None
    torch: str | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if self.name != " ".join(self.name.lower().split()) or not self.name:
            raise ValueError(f"record: name {self.name!r}; give lower-case words with single spaces between them")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"record {self.name!r}: better={self.better!r}; give 'lower' or 'higher'")
        numbers = (self.ours, self.std, *self.values, self.paper, self.bound, self.wall_s)
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"record {self.name!r}: {numbers} are not all finite; enter a row that failed with ours=None")
        from_somewhere = (self.command, self.hardware, self.torch)
        if self.ours is None and any(from_somewhere):
            raise ValueError(f"record {self.name!r}: ours is None, so it was not run, yet it has an origin; leave that out")
        if self.ours is not None and not all(from_somewhere):
            raise ValueError(f"record {self.name!r}: command, hardware or torch is missing; give **origin(command, device)")


def read(path: str | Path) -> list[Record]:
    """The records of a file."""
    try:
        return [Record(**record) for record in json.loads(Path(path).read_text("utf-8"))["records"]]
    except (ValueError, TypeError, KeyError) as error:
        names = ", ".join(field.name for field in fields(Record))
        raise ValueError(f"{path} is not of the form {{'records': [{{{names}}}]}}: {error}") from error


def write(path: str | Path, records: Iterable[Record]) -> None:
    """Merges into the file: a record takes the place of the old one of its name. A reader never sees half a file."""
    path = Path(path)
    merged = {record.name: record for record in (read(path) if path.exists() else [])}
    merged.update((record.name, record) for record in records)
    lines = ",\n".join(json.dumps(asdict(record), allow_nan=False) for record in merged.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f'{{"records": [\n{lines}\n]}}\n', "utf-8")
    unfinished.replace(path)


def origin(command: str, device: torch.device | str = "cpu") -> Origin:
    """The origin of what `command` measures on `device` now: `Record(..., **origin(command, device))`."""
    return {
        "command": command,
        "commit": _commit(),
        "hardware": _hardware(torch.device(device)),
        "torch": torch.__version__,
    }


def short_name(device: torch.device | str) -> str:
    """The device in the name of a record: "cpu", "h200", "rtx 4090"."""
    device = torch.device(device)
    if device.type != "cuda":
        return device.type
    words = re.sub(r"nvidia|geforce|tesla", "", torch.cuda.get_device_name(device).lower()).split()
    model = [word.split("-")[0] for word in words if not re.fullmatch(r"\d+gb|hbm\d\w*|pcie|nvl", word)]
    return " ".join(model)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)):
        model = found[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} {'core' if cores == 1 else 'cores'}"


def _commit() -> str | None:
    """The commit of the checkout that this file is part of, "-dirty" where the tree differs; None outside one.

    A copy of a checkout without its history is told its commit by the environment variable SUBCAPS_COMMIT.
    """
    if told := os.environ.get("SUBCAPS_COMMIT"):
        return told
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # a package installed inside another checkout is not tracked
        commit = _git("rev-parse", "HEAD")
        # what was measured lies in `results/` itself, and does not change what is measured
        dirty = _git("status", "--porcelain", "--", ":(top)", ":(top,exclude)results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}-dirty" if dirty else commit


def _git(*arguments: str) -> str:
    here = Path(__file__).resolve().parent
    return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    rows = [header, *rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def number(value: float | None) -> str:
    """Three digits, more only where they stand before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
