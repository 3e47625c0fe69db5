"""What `subcaps bench polar` times: `polar` by each of its engines, and other ways to orthonormal columns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from subcaps.projection import polar

# From rows (n, c, d), as a layer stores them: the leaf that is differentiated, and a function that gives Q (n, d, c).
Prepare = Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]


class Method(NamedTuple):
    """A way to orthonormal columns.

    Where its cost may become too much, `work` says what that grows with, `probe` is a shape (n, d, c) small enough to
    time and large enough to tell, and `squares` is how many (d, d) matrices it holds for each type. `as_graph`: it
    never waits for a CUDA device, so that a graph can hold it.
    """

    prepare: Prepare
    work: Callable[[int, int, int], float] | None = None
    probe: tuple[int, int, int] = (1, 512, 2)
    squares: int = 0
    as_graph: bool = False


def methods(c: int, device: torch.device, compiled: bool) -> dict[str, Method]:
    """What applies to matrices of c columns, by the name it has in the records."""
    engines = [*(["closed"] if c <= 2 else []), "eigh", "quintic", "svd"]
    found = {name: Method(_function(partial(polar, method=name)), as_graph=name == "quintic") for name in engines}
    if "closed" in found:
        found["closed"] = found["closed"]._replace(as_graph=True)
    found["auto"] = Method(_function(polar), as_graph=device.type == "cuda")
    found["paper"] = Method(_function(partial(polar, method="paper")), as_graph=True)
    if compiled:
        found["paper compiled"] = Method(_compiled_paper, as_graph=True)
    found["authors"] = Method(_function(partial(polar, method="authors")), as_graph=True)
    found["eigh autograd"] = Method(_function(analytic))
    found["qr"] = Method(_function(lambda W: torch.linalg.qr(W).Q))
    # its backward pass makes a d x d matrix for each reflection
    found["torch householder"] = Method(partial(_torch, "householder"), lambda n, d, c: n * d**2 * c, (8, 1152, 2), squares=2)
    found["torch cayley"] = Method(partial(_torch, "cayley"), _cube, squares=10)
    found["torch matrix_exp"] = Method(partial(_torch, "matrix_exp"), _cube, squares=52)
    return found | _geotorch() | _orthogonium()


def analytic(W: Tensor) -> Tensor:
    """Q = W V diag(1/h) V^T with A = W^T W = V diag(h^2) V^T, as one would write it, with autograd through `eigh`."""
    squares, V = torch.linalg.eigh(W.mT @ W)
    Q: Tensor = W @ ((V * squares.rsqrt().unsqueeze(-2)) @ V.mT)
    return Q


def _cube(n: int, d: int, c: int) -> float:
    return n * d**3


def _function(function: Callable[[Tensor], Tensor]) -> Prepare:
    def prepare(rows: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        leaf = rows.detach().requires_grad_()
        return leaf, lambda: function(leaf.mT)  # (n, c, d) -> (n, d, c), a view

    return prepare


def _compiled_paper(rows: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    torch.compiler.reset()  # else the ninth shape would not be compiled
    return _function(torch.compile(partial(polar, method="paper"), dynamic=False))(rows)


def _parametrized(rows: Tensor, register: Callable[[nn.Module], Any]) -> tuple[Tensor, Callable[[], Tensor]]:
    module = nn.Module()
    module.weight = nn.Parameter(rows.clone())
    register(module)
    parametrizations: Any = module.parametrizations
    return parametrizations.weight.original, lambda: module.weight.mT  # type: ignore[union-attr,operator,unused-ignore]


def _torch(orthogonal_map: str, rows: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    # without trivialization, which multiplies by one more d x d matrix
    return _parametrized(rows, lambda module: orthogonal(module, "weight", orthogonal_map, use_trivialization=False))


def _geotorch() -> dict[str, Method]:
    try:
        with warnings.catch_warnings(action="ignore"):
            import geotorch
    except ImportError:
        return {}
    register = partial(_parametrized, register=lambda module: geotorch.orthogonal(module, "weight"))
    return {"geotorch": Method(register, _cube, squares=54)}


def _orthogonium() -> dict[str, Method]:
    try:
        with warnings.catch_warnings(action="ignore"):
            from orthogonium import reparametrizers
    except ImportError:
        return {}

    def prepare(params: Any, rows: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        spectral = params.spectral_normalizer(weight_shape=rows.shape).to(rows.device)
        maps = nn.Sequential(spectral, params.orthogonalizer(weight_shape=rows.shape))
        weight = rows.detach().clone().requires_grad_()
        return weight, lambda: maps(weight).mT

    return {
        "orthogonium bjorck": Method(partial(prepare, reparametrizers.DEFAULT_ORTHO_PARAMS)),
        "orthogonium cholesky": Method(partial(prepare, reparametrizers.CHOLESKY_STABLE_ORTHO_PARAMS)),
    }
