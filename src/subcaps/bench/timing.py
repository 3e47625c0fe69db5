"""Timing: medians of warm runs, with the methods in alternation inside one process, so that noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[[], object]

cuda: Any = torch.cuda  # torch has no types for parts of it

SAMPLE_S = 0.002  # a sample of a fast method is the mean of as many calls as fill this
FEWEST = 3  # samples of a method, however slow it is

LIMIT_S, LIMIT_GIB = 60.0, 8.0


@dataclass
class Timing:
    """Milliseconds of a call, sample by sample, and the seconds that taking them took."""

    values: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.values)

    @property
    def std(self) -> float | None:
        """Of the samples, if there is more than one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


def alternate(calls: Mapping[str, Call], device: torch.device, rounds: int, seconds: float) -> dict[str, Timing]:
    """Times each call once per round. One that has used up its `seconds` leaves, after three samples at the earliest.

    The calls must be warm: each has run before. On CUDA a time is one between device events.
    """
    timings = {name: Timing() for name in calls}
    repeats = {}
    for name, call in calls.items():
        elapsed = timings[name].wall_s = _seconds(call, 1, device)
        repeats[name] = max(1, round(SAMPLE_S / elapsed))
        if repeats[name] == 1:
            timings[name].values.append(elapsed * 1e3)
    for done in range(rounds):
        for name, call in calls.items():
            timing = timings[name]
            used_up = timing.wall_s > seconds and len(timing.values) >= FEWEST
            if used_up or len(timing.values) > done:
                continue
            elapsed = _seconds(call, repeats[name], device)
            timing.values.append(elapsed / repeats[name] * 1e3)
            timing.wall_s += elapsed
    return timings


def _seconds(call: Call, repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    before = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - before


def replayed(call: Call) -> Call:
    """The same call as one CUDA graph, which is launched at once. It must not wait for the device."""
    stream = cuda.Stream()
    stream.wait_stream(cuda.current_stream())
    with cuda.stream(stream):
        for _ in range(3):
            call()
    cuda.current_stream().wait_stream(stream)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, stream=stream):
        call()
    replay: Call = graph.replay
    return replay


def too_costly(seconds: float, gibibytes: float) -> str | None:
    """Why a method is not started, if it is not: what it is predicted to need to be warmed and timed."""
    if gibibytes > LIMIT_GIB:
        return f"not run: needs {gibibytes:.0f} GiB, over {LIMIT_GIB:.0f}"
    total = seconds * (1 + FEWEST)
    if total > LIMIT_S:
        return f"not run: needs {1 + FEWEST} calls of {seconds:.0f} s, over {LIMIT_S:.0f} s"
    return None


def matmul_rate(device: torch.device, rounds: int, side: int) -> Timing:
    """A large product of float32 matrices, in GFLOP/s: what the machine can do at best."""
    A, B = torch.randn(2, side, side, device=device).unbind()
    return _rate(lambda: A @ B, 2 * side**3, device, rounds)


def copy_rate(device: torch.device, rounds: int, megabytes: int) -> Timing:
    """A large copy, read and written, in GB/s."""
    source = torch.randn(megabytes * 250_000, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * 4 * source.numel(), device, rounds)


def _rate(call: Call, amount: float, device: torch.device, rounds: int) -> Timing:
    call()
    timing = alternate({"": call}, device, rounds, seconds=60)[""]
    return Timing([amount / 1e6 / ms for ms in timing.values], timing.wall_s)
