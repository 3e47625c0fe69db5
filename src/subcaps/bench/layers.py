"""`subcaps bench layers`: what capsules cost. Activations beside a ReLU, steps and fused networks beside the CNN twin."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subcaps.bench.networks import CASES, QUICK, Case
from subcaps.bench.timing import Call, Timing, alternate, copy_rate, replayed
from subcaps.measure.records import Origin, Record, markdown, number, origin, short_name, write
from subcaps.nn import SubspaceLayer, fuse, projected
from subcaps.nn import functional as F

MEGABYTES = 64


class Bench:
    """Measures, prints each row as it comes, and keeps the records."""

    def __init__(self, device: torch.device, quick: bool, source: Origin) -> None:
        self.device, self.quick, self.source = device, quick, source
        self.place = short_name(device)
        self.rounds, self.seconds = (2, 0.01) if quick else (15, 5.0)
        self.records: list[Record] = []
        self.rows: list[tuple[str, ...]] = []

    def time(self, calls: dict[str, Call]) -> dict[str, Timing]:
        """Medians in alternation, after two warm calls of each."""
        for call in calls.values():
            call()
            call()
        return alternate(calls, self.device, self.rounds, self.seconds)

    def keep(self, name: str, timing: Timing, unit: str, note: str = "") -> None:
        """One record and one line of the table."""
        self.records.append(
            Record(
                name=f"{name} {self.place}",
                ours=timing.median,
                std=timing.std,
                values=tuple(timing.values),
                unit=unit,
                better="lower",
                wall_s=timing.wall_s,
                **self.source,
            )
        )
        self.rows.append((name, number(timing.median), unit, note))
        print(f"{name:60s} {number(timing.median):>8s} {unit:8s} {note}", flush=True)


def run(on: Literal["cpu", "cuda"] = "cpu", out: str | None = None, quick: bool = False) -> None:
    """Times everything, prints a table and writes the records."""
    if on == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"bench layers: torch {torch.__version__} finds no CUDA device here; leave out --device cuda")
    device = torch.device(on)
    command = " ".join(["subcaps bench layers", *["--device cuda"] * (on == "cuda"), *["--quick"] * quick])
    torch.manual_seed(0)
    bench = Bench(device, quick, origin(command, device))
    print(f"{bench.source['hardware']}, torch {bench.source['torch']}, commit {bench.source['commit'] or 'unknown'}\n")
    _activations(bench)
    for case in QUICK if quick else CASES:
        _steps(bench, case)
        _memory(bench, case)
        _fused(bench, case)
    print("\n" + markdown(("", "median", "unit", ""), bench.rows))
    if quick and out is None:
        print("--quick writes nothing without --out")
        return
    path = Path(out or f"results/bench/layers-{bench.place.replace(' ', '-')}.json")
    write(path, bench.records)
    print(f"{len(bench.records)} records: {path}")


def _activations(bench: Bench) -> None:
    """Forward + backward of one tensor, eager and compiled."""
    count = 4 if bench.quick else MEGABYTES * 2**20 // (64 * 32 * 32)
    bandwidth = copy_rate(bench.device, 3, 1 if bench.quick else 256).median
    for dtype in (torch.float32, torch.bfloat16):
        for layout, dim in ((torch.contiguous_format, 2), (torch.channels_last, 2), (torch.channels_last, 16)):
            u = torch.randn(count // dtype.itemsize, 64, 32, 32, device=bench.device).to(dtype).contiguous(memory_format=layout)
            u.requires_grad_()
            g = torch.randn_like(u)
            b = torch.full((64 // dim,), 0.5, device=bench.device, requires_grad=True)
            functions: dict[str, Callable[[Tensor], Tensor]] = {
                "relu": torch.relu,
                "spark": partial(F.spark, b=b),
                "squash": partial(F.squash, dim=dim),
            }
            floor = 5 * u.numel() * u.element_size() / bandwidth / 1e6
            for mode in ("eager",) if bench.quick or dim > 2 else ("eager", "compiled"):
                calls = {
                    name: _forward_backward(torch.compile(call) if mode == "compiled" else call, u, g)
                    for name, call in functions.items()
                }
                times = bench.time(calls)
                size = f"{'1' if bench.quick else MEGABYTES} mb {str(dtype).removeprefix('torch.')}"
                for name, timing in times.items():
                    where = "channels-last" if layout == torch.channels_last else "contiguous"
                    ratio = timing.median / times["relu"].median
                    aim = _aim(ratio, 3.0 if mode == "eager" else 1.5)
                    note = f"{ratio:.2f} x relu{aim}, {timing.median / floor:.1f} x the floor of five passes"
                    bench.keep(f"{name} {size} dim {dim} {where} {mode}", timing, "ms", note)
                torch.compiler.reset()


def _forward_backward(call: Callable[[Tensor], Tensor], u: Tensor, g: Tensor) -> Call:
    def step() -> None:
        u.grad = None
        call(u).backward(g)

    return step


def _steps(bench: Bench, case: Case) -> None:
    """A training step without the optimizer's: the SCN under `projected`, its twin, and the projections alone."""
    modes = ("eager",) if bench.quick else ("eager", "compiled") if bench.device.type == "cpu" else ("eager", "graph")
    for mode in modes:
        models = {"twin": case.twin(), "scn": case.scn()}
        x = torch.randn(case.batch, *case.image, device=bench.device).contiguous(memory_format=torch.channels_last)
        calls: dict[str, Call] = {}
        for kind, model in models.items():
            model.to(bench.device).to(memory_format=torch.channels_last)
            calls[kind] = _training_step(model, torch.compile(model) if mode == "compiled" else model, x)
        calls["projection"] = _projection_step(models["scn"])
        if mode == "graph":
            calls = {kind: replayed(call) for kind, call in calls.items()}
        times = bench.time(calls)
        twin, scn, projection = (times[kind].median for kind in ("twin", "scn", "projection"))
        name = f"step {case.name} batch {case.batch} bf16"
        bench.keep(f"{name} cnn {mode}", times["twin"], "ms")
        bench.keep(f"{name} projection {mode}", times["projection"], "ms", f"{projection / twin:.1%} of the twin's step")
        more = (scn - twin - projection) / twin
        note = f"twin {scn / twin - 1:+.1%}, {more:+.1%} beyond the projection{_aim(more, 0.1 if mode == 'eager' else 0.03)}"
        bench.keep(f"{name} scn {mode}", times["scn"], "ms", note)
        torch.compiler.reset()


def _training_step(model: nn.Module, runs: Any, x: Tensor) -> Call:
    def step() -> None:
        model.zero_grad()
        with projected(model), torch.autocast(x.device.type, torch.bfloat16):
            runs(x).float().square().mean().backward()

    return step


def _projection_step(model: nn.Module) -> Call:
    layers = [module for module in model.modules() if isinstance(module, SubspaceLayer)]
    gradients = [torch.randn_like(layer.subspaces().mT).mT for layer in layers]

    def step() -> None:
        model.zero_grad()
        torch.autograd.backward([layer.subspaces() for layer in layers], gradients)

    return step


def _memory(bench: Bench, case: Case) -> None:
    """The most memory that a training step holds beyond what it found, SCN and twin."""
    x = torch.randn(case.batch, *case.image, device=bench.device).contiguous(memory_format=torch.channels_last)
    peaks = {}
    for kind, model in (("cnn", case.twin()), ("scn", case.scn())):
        model.to(bench.device).to(memory_format=torch.channels_last)
        step = _training_step(model, model, x)
        step()
        peaks[kind] = _peak_bytes(step, bench.device)
        ratio = peaks[kind] / peaks["cnn"]
        note = f"{ratio:.3f} x twin{_aim(ratio, 1.05)}" if kind == "scn" else ""
        bench.keep(f"memory {case.name} batch {case.batch} bf16 {kind}", Timing([peaks[kind] / 2**20]), "MiB", note)


def _peak_bytes(step: Call, device: torch.device) -> float:
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    events: Any = profile.profiler.kineto_results.events()
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@torch.no_grad()
def _fused(bench: Bench, case: Case) -> None:
    """Inference in float32: twin, SCN as trained under `projected`, SCN fused; in torch and, where it is there, onnxruntime."""
    x = torch.randn(case.batch, *case.image, device=bench.device).contiguous(memory_format=torch.channels_last)
    scn = case.scn().to(bench.device).to(memory_format=torch.channels_last).eval()
    models = {"cnn": case.twin().to(bench.device).eval(), "scn unfused": scn, "scn fused": fuse(scn)}
    calls: dict[str, Call] = {kind: partial(model.to(memory_format=torch.channels_last), x) for kind, model in models.items()}
    if bench.device.type == "cpu" and not bench.quick:
        calls |= _onnx_calls(models, x)
    times = bench.time(calls)
    for kind, timing in times.items():
        twin = times["cnn onnxruntime" if "onnx" in kind else "cnn"].median
        engine = "" if "onnx" in kind else " torch"
        ratio = timing.median / twin
        note = f"{ratio:.3f} x twin" + (_aim(ratio, 1.01) if "fused" in kind and "unfused" not in kind else "")
        bench.keep(f"fused {case.name} batch {case.batch} {kind}{engine}", timing, "ms", note)


def _onnx_calls(models: dict[str, nn.Module], x: Tensor) -> dict[str, Call]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        print("onnxruntime is not installed; pip install 'PATH/TO/CLONE[export]' times it too")
        return {}
    calls: dict[str, Call] = {}
    for kind in ("cnn", "scn fused"):
        program = torch.onnx.export(models[kind], (x.contiguous(),), dynamo=True, verbose=False)
        assert program is not None
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: x.contiguous().numpy()}
        calls[f"{kind} onnxruntime"] = partial(session.run, None, inputs)
    return calls


def _aim(value: float, at_most: float) -> str:
    """Whether an aim is met. It is no bound, so no record holds it."""
    return f" (aim {at_most:g}: {'met' if value <= at_most else 'missed'})"
