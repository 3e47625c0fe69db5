"""One shape of `subcaps bench polar`: how exact each method is there, and how long it takes, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from subcaps.bench.rivals import Method, methods
from subcaps.bench.timing import Call, Timing, alternate, replayed, too_costly
from subcaps.projection import polar

SEED = 0
PRODUCTS = "tall products"
ILL_CONDITIONED = "auto kappa 100"


class Shape(NamedTuple):
    """n types, each the span of c columns in d dimensions, and the layer that has them."""

    n: int
    d: int
    c: int
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.n}x{self.d}x{self.c}"


class Errors(NamedTuple):
    """Against float64: the worst entry of Q^T Q - I, the worst relative error of a type's Q, and of its gradient."""

    orthonormality: float
    Q: float
    gradient: float

    @property
    def within_bounds(self) -> bool:
        """Those of the accuracy tests, up to a condition number of 100."""
        return self.orthonormality <= 1e-5 and self.Q <= 1e-4 and self.gradient <= 1e-4


@dataclass
class Row:
    """One method. `timings` are by mode: "" on the CPU, "eager" and "graph" on CUDA. Without any, `note` says why."""

    errors: Errors | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    note: str = ""

    @property
    def is_polar(self) -> bool:
        """It returns the polar factor, and its gradient, within the bounds."""
        return self.errors is not None and self.errors.within_bounds


class Case:
    """W and G, and what is right in float64. W is the transposed view of contiguous rows, as the layers store it."""

    def __init__(self, rows: Tensor, G: Tensor) -> None:
        self.rows, self.G = rows, G
        W = rows.mT.double().requires_grad_()
        Q = polar(W)
        (self.dW,) = torch.autograd.grad(Q, W, G.double())
        self.Q = Q.detach()

    def call(self, method: Method) -> Callable[[], tuple[Tensor, Tensor]]:
        """Forward and backward: Q and the gradient."""
        leaf, function = method.prepare(self.rows)

        def forward_and_backward() -> tuple[Tensor, Tensor]:
            Q = function()
            return Q.detach(), torch.autograd.grad(Q, leaf, self.G)[0].mT

        return forward_and_backward

    def errors(self, Q: Tensor, dW: Tensor) -> Errors:
        """Of a method's results."""
        Q = Q.double()
        excess = Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
        return Errors(excess.abs().max().item(), _relative(Q, self.Q), _relative(dW.double(), self.dW))


def bench(
    shape: Shape, device: torch.device, rounds: int, seconds: float, compiled: bool = False, only: Sequence[str] = ()
) -> dict[str, Row]:
    """All methods, or `only` these, and the tall products alone."""
    torch.manual_seed(SEED)
    n, d, c, _ = shape
    G = torch.randn(n, c, d, device=device).mT
    gaussian = Case(torch.randn(n, c, d, device=device), G)
    found = methods(c, device, compiled)
    cases = {name: (found[name], gaussian) for name in only or found}
    if not only:
        cases[ILL_CONDITIONED] = found["auto"], Case(_ill_conditioned(gaussian.Q, 100.0), G)
        cases["auto again"] = found["auto"], gaussian  # the same twice: a smaller difference than theirs is noise

    rows, calls = {PRODUCTS: Row()}, {PRODUCTS: _tall_products(gaussian)}
    for name, (method, case) in cases.items():
        rows[name], call = _warm(name, method, case, shape)
        if call:
            calls[name] = call
    calls[PRODUCTS]()
    if "auto" not in calls:
        raise RuntimeError(f"bench polar: polar failed on {shape}: {rows['auto'].note}")
    modes = {"": calls}
    if device.type == "cuda":
        without_waiting = [PRODUCTS, *(name for name in calls if name in cases and cases[name][0].as_graph)]
        modes = {"eager": calls, "graph": _graphs({name: calls[name] for name in without_waiting})}
    for mode, of_mode in modes.items():
        for name, timing in alternate(of_mode, device, rounds, seconds).items():
            rows[name].timings[mode] = timing
    return rows


def _warm(name: str, method: Method, case: Case, shape: Shape) -> tuple[Row, Call | None]:
    """Calls it for the first time, for its errors, unless that would be too costly."""
    if note := _predicted(name, method, shape, case.rows.device):
        return Row(note=note), None
    try:
        call, before = case.call(method), time.perf_counter()
        errors = case.errors(*call())
    except Exception as error:  # that a rival fails is a result, too
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return Row(note=f"failed: {reason:.80}"), None
    if method.work and (note := too_costly(time.perf_counter() - before, 0)):
        return Row(errors, note=note), None
    return Row(errors), call


def _predicted(name: str, method: Method, shape: Shape, device: torch.device) -> str | None:
    """Why a method is not started here, if it is not."""
    n, d, c, _ = shape
    gibibytes = method.squares * n * d**2 * 4 / 2**30
    if method.work is None or (growth := method.work(n, d, c) / method.work(*method.probe)) <= 1:
        return too_costly(0, gibibytes)
    return too_costly(0, gibibytes) or too_costly(growth * _seconds_of_probe(name, device), gibibytes)


@functools.cache
def _seconds_of_probe(name: str, device: torch.device) -> float:
    """One small run, from which the cost of large ones is predicted."""
    n, d, c = methods(2, device, compiled=False)[name].probe
    rows = torch.randn(n, c, d, device=device)
    call = Case(rows, rows.mT).call(methods(c, device, compiled=False)[name])
    call()
    before = time.perf_counter()
    call()[1].sum().item()  # waits for the device
    return time.perf_counter() - before


def _graphs(calls: dict[str, Call]) -> dict[str, Call]:
    graphs = {}
    for name, call in calls.items():
        with contextlib.suppress(RuntimeError):  # what no graph can hold is left out
            graphs[name] = replayed(call)
    return graphs


def _ill_conditioned(Q: Tensor, kappa: float) -> Tensor:
    """Rows of a W with the polar factor Q and this condition number."""
    n, _, c = Q.shape
    V = polar(torch.randn(n, c, c, dtype=Q.dtype, device=Q.device))
    h = torch.logspace(0, -math.log10(kappa), c, dtype=Q.dtype, device=Q.device)
    H = (V * h) @ V.mT
    return (Q @ H).float().mT.contiguous()


def _tall_products(case: Case) -> Call:
    """The five products with a d x c matrix that an exact forward and backward cannot do without."""
    W, G = case.rows.mT, case.G
    H_inv, M = torch.randn(2, len(W), W.shape[-1], W.shape[-1], device=W.device).unbind()

    def products() -> tuple[Tensor, Tensor, Tensor]:
        A = W.mT @ W
        P = H_inv @ W.mT  # Q^T = H^-1 W^T
        K = P @ G  # Q^T G
        dP = (M @ P).baddbmm_(H_inv, G.mT)  # (G H^-1 + Q M)^T
        return A, K, dP

    return products


def _relative(value: Tensor, right: Tensor) -> float:
    norm = torch.linalg.matrix_norm
    return float((norm(value - right) / norm(right)).max())
