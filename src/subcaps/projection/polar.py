"""`polar`: W -> Q = W (W^T W)^(-1/2), whose transpose is the paper's P_c. This is the whole kernel of a subspace capsule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subcaps.projection.engine import ENGINES, differentiate, factor, full_precision, root_dtype
from subcaps.projection.paper import authors, paper

METHODS = ("auto", *ENGINES, "paper", "authors")


def polar(W: Tensor, method: str = "auto") -> Tensor:
    """The orthonormal polar factor Q = W (W^T W)^(-1/2) of a matrix, or of each matrix in a batch.

    The columns of W (d x c) span a capsule's subspace. P_c = Q^T takes an input x to its capsule u = P_c x, P_d = Q takes
    it back, and Q Q^T is the orthogonal projection onto the subspace.

    Args:
        W: (..., d, c) with d >= c. Float32 and float64; lower precisions are computed in float32 and cast back.
        method: `"auto"` picks the fastest exact engine: `"closed"` for c <= 2, `"svd"` for float64, else `"eigh"` on the CPU
            and `"quintic"` on other devices. `"closed"` and `"quintic"` never make a GPU wait for the host, `"eigh"` and
            `"svd"` do. `"paper"` is the paper's 20 coupled steps with autograd through them and `"authors"` the 10 of their
            code: baselines, inexact for ill-conditioned W, and their backward pass follows torch's TF32 settings.

    Returns:
        Q, in the shape, strides and dtype of W. A rank-deficient W gives the partial isometry, zero on W's null directions,
        where the gradient is zero too (`"quintic"` stops short of that: it is exact where the condition number times sqrt(c)
        is at most 11,000). A matrix with a NaN or an infinity gives NaN, and leaves the others of its batch alone.

    The gradient is exact, and is itself no differentiable function of W: only `"paper"` and `"authors"` have a second
    derivative with respect to W.

    Example:
        >>> import torch, subcaps
        >>> W = torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])  # a plane in space
        >>> Q = subcaps.polar(W)
        >>> Q.T @ torch.tensor([1.0, 2.0, 5.0])  # the capsule of a point: where its shadow falls in the plane
        tensor([1., 2.])
    """
    _check(W, method)
    narrow = W.dtype in (torch.float16, torch.bfloat16)
    W_full = _Widened.apply(W) if narrow else W
    if method in ("paper", "authors"):
        # the compiler cannot trace a change of precision
        compiling = torch.compiler.is_compiling()
        with torch.autocast(W.device.type, enabled=False) if compiling else full_precision(W.device):
            Q = paper(W_full) if method == "paper" else authors(W_full)
    else:
        Q = _Polar.apply(W_full, _engine(W_full) if method == "auto" else method)[0]
    return Q.to(W.dtype) if narrow else Q


def _engine(W: Tensor) -> str:
    if W.shape[-1] <= 2:
        return "closed"
    if W.dtype == torch.float64:
        return "svd"
    return "eigh" if W.device.type == "cpu" else "quintic"


def _check(W: Tensor, method: str) -> None:
    if not isinstance(W, Tensor):
        raise TypeError(f"polar: W is a {type(W).__name__}; give a torch.Tensor of shape (..., d, c)")
    if W.dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(f"polar: W has dtype {W.dtype}; give float32, float64, float16 or bfloat16 (`W.float()`)")
    if W.ndim < 2:
        raise ValueError(f"polar: W has shape {tuple(W.shape)}; give a matrix or a batch of them, (..., d, c)")
    if W.numel() == 0:
        raise ValueError(f"polar: W has shape {tuple(W.shape)}, which is empty; give at least one matrix, row and column")
    d, c = W.shape[-2:]
    if c > d:
        raise ValueError(
            f"polar: W has shape {tuple(W.shape)}: c={c} columns in d={d} dimensions; a subspace cannot have more dimensions "
            "than the space. Is W transposed? `W.mT` swaps its last two dimensions"
        )
    if method not in METHODS:
        raise ValueError(f"polar: unknown method {method!r}; choose one of {', '.join(map(repr, METHODS))}")
    if method == "closed" and c > 2:
        raise ValueError(f"polar: method 'closed' is for c of 1 and 2, W has c={c}; choose 'auto', 'eigh' or 'quintic'")


# The operators are opaque to torch's compiler and exporter. The autograd functions around them are what torch.func needs.
# They are defined by schema: `torch.library.custom_op` would check each call for aliasing, which takes longer than a
# small layer's projection.

_define = torch.library.define
_define("subcaps::polar", "(Tensor W, str method) -> (Tensor, Tensor, Tensor, Tensor)")
_define("subcaps::polar_gradient", "(Tensor G, Tensor Q, Tensor first, Tensor second, Tensor scale, str method) -> Tensor")


@torch.library.impl("subcaps::polar", "CompositeExplicitAutograd")
def _(W: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with full_precision(W.device):
        Q, *root = factor(W.reshape(-1, *W.shape[-2:]), ENGINES[method])
    first, second, scale = (small.reshape(*W.shape[:-2], *small.shape[-2:]) for small in root)
    return _laid_out_as(W, Q), first, second, scale


@torch.library.register_fake("subcaps::polar")  # type: ignore[untyped-decorator]
def _(W: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, c, dtype = W.shape[:-2], W.shape[-1], root_dtype(W.device)
    return (
        torch.empty_like(W),
        W.new_empty((*batch, c, c), dtype=dtype),
        W.new_empty((*batch, *ENGINES[method].second(c)), dtype=dtype),
        W.new_empty((*batch, 1, 1), dtype=dtype),
    )


@torch.library.impl("subcaps::polar_gradient", "CompositeExplicitAutograd")
def _(G: Tensor, Q: Tensor, first: Tensor, second: Tensor, scale: Tensor, method: str) -> Tensor:
    flat = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (G, Q, first, second, scale))
    with full_precision(G.device):
        dW = differentiate(ENGINES[method], *flat)
    return _laid_out_as(Q, dW)


@torch.library.register_fake("subcaps::polar_gradient")  # type: ignore[untyped-decorator]
def _(G: Tensor, Q: Tensor, first: Tensor, second: Tensor, scale: Tensor, method: str) -> Tensor:
    return torch.empty_like(Q)


def _laid_out_as(W: Tensor, result: Tensor) -> Tensor:
    """`result` in the shape and strides that `empty_like(W)` has."""
    result = result.reshape(W.shape)
    if W.mT.is_contiguous() and result.mT.is_contiguous():
        return result
    return torch.empty_like(W).copy_(result)


_polar = torch.ops.subcaps.polar.default
_polar_gradient = torch.ops.subcaps.polar_gradient.default


def _batch_first(info: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]


@torch.library.register_vmap("subcaps::polar")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[int | None, ...], W: Tensor, method: str) -> tuple[Any, tuple[int, ...]]:
    (W,) = _batch_first(info, in_dims[:1], (W,))
    return _polar(W, method), (0, 0, 0, 0)


@torch.library.register_vmap("subcaps::polar_gradient")  # type: ignore[untyped-decorator]
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    *tensors, method = args
    return _polar_gradient(*_batch_first(info, in_dims[:-1], tuple(tensors)), method), 0


class _Widened(torch.autograd.Function):
    """float32 of 16 bits. A gradient too large for them is the largest number, as everywhere here."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor) -> Tensor:
        return W.float()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Tensor:
        largest = torch.finfo(ctx.dtype).max
        return G.clamp(-largest, largest).to(ctx.dtype)


class _Polar(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, method: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _polar(W, method)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: tuple[Tensor, ...]) -> None:
        ctx.method = inputs[1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, G: Tensor | None, *_: None) -> tuple[Tensor | None, None]:
        if G is None:
            return None, None
        try:
            saved = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                "polar: a second backward pass through one projection, whose graph the first has freed. Inside `projected` a "
                "layer's projection is one node: sum the losses and call backward once, open a block for every backward "
                "pass, or give retain_graph=True"
            ) from error
        # a graph of the backward pass is only made to say that it cannot be differentiated
        gradient = _PolarGradient.apply if torch.is_grad_enabled() else _polar_gradient
        return gradient(G, *saved, ctx.method), None


class _PolarGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(G: Tensor, Q: Tensor, first: Tensor, second: Tensor, scale: Tensor, method: str) -> Tensor:
        return _polar_gradient(G, Q, first, second, scale, method)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise NotImplementedError(
            "polar: a second derivative with respect to W was asked for; its gradient is exact but is not differentiable "
            "again. Differentiate with respect to inputs only (a gradient penalty does), or use method='paper'"
        )
