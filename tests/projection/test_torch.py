"""`polar` within torch: the compiler, the exporter, torch.func, autocast, matmul precision, copies, gradient penalties."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from subcaps import polar

from .reference import BASELINES, dims, engines, excesses, gaussian, seeds, singular_values, weight

# Torch's compiler and exporter use what torch has deprecated.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{warning}") for warning in ("DeprecationWarning", "FutureWarning")]

close = torch.testing.assert_close
every_method = pytest.mark.parametrize("method", ["auto", *engines(1), *BASELINES])
every_kind = pytest.mark.parametrize("method", [*engines(1), "paper"])  # where it takes long


def loss(W, method="auto"):
    return (polar(W, method) ** 3).sum()


class Capsules(nn.Module):
    """The least layer that uses `polar`: 4 types of 3 dimensions, rows of P_c contiguous."""

    def __init__(self, method="auto", in_features=10):
        super().__init__()
        self.method = method
        self.weight = nn.Parameter(gaussian(4, 3, in_features, seed=0).float())

    def forward(self, x):
        return torch.einsum("ndc,bd->bnc", polar(self.weight.mT, self.method), x)


def x(batch=5, in_features=10):
    return gaussian(batch, in_features, seed=1).float()


def assert_compiled_equals_eager(method, backend, c=2, dtype=torch.float32, d=6, by_rows=True):
    torch.compiler.reset()
    W = weight(3, d, c, seed=0).to(dtype)
    W = (W.mT.contiguous().mT if by_rows else W.contiguous()).requires_grad_()
    compiled = torch.compile(polar, fullgraph=True, backend=backend)(W, method)
    eager = polar(W, method)
    close(compiled, eager)
    close(torch.autograd.grad((compiled**3).sum(), W), torch.autograd.grad((eager**3).sum(), W))


@every_kind
def test_compiles_without_a_break(method):
    assert_compiled_equals_eager(method, "aot_eager")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("c", [1, 2, 3])
def test_compiles_in_every_precision(c, dtype):
    assert_compiled_equals_eager("auto", "aot_eager", c, dtype)


@pytest.mark.parametrize("c", [1, 2, 3])
def test_one_compilation_serves_every_shape(c):
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, d in ((3, 10), (4, 12), (5, 20)):
        W = weight(n, d, c, seed=n).float().requires_grad_()
        close(torch.autograd.grad(compiled(W), W), torch.autograd.grad(loss(W), W))


def test_inductor_compiles_it():
    """c = 3 on the CPU is `eigh`, of whose results inductor checks the strides; W is in the other layout too."""
    assert_compiled_equals_eager("auto", "inductor", c=3, by_rows=False)


@pytest.mark.long
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("c", [1, 2, 3])
@every_method
def test_inductor_compiles_every_method(method, c, by_rows):
    if method != "closed" or c <= 2:
        assert_compiled_equals_eager(method, "inductor", c, by_rows=by_rows)


@every_kind
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch.export.load of torch 2.11
def test_exports_for_any_batch_and_loads_again(method):
    if method == "closed":
        method = "auto"  # the layer's c is 3
    layer = Capsules(method)
    exported = torch.export.export(layer, (x(),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, exported.run_decompositions(), torch.export.load(file)):
        close(program.module()(x(7)), layer(x(7)))


@every_method
@settings(max_examples=5)
@given(dim=st.integers(0, 2), c=st.integers(1, 2), excess=excesses, seed=seeds)
def test_vmap_is_a_batch(method, dim, c, excess, seed):
    W = weight(3, c + excess, c, seed=seed)
    mapped = torch.func.vmap(lambda W: polar(W, method), in_dims=dim, out_dims=dim)
    close(mapped(W.movedim(0, dim).contiguous()).movedim(dim, 0), polar(W, method))
    twice = torch.func.vmap(mapped, in_dims=1, out_dims=1)
    W = torch.stack([W.movedim(0, dim), 2 * W.movedim(0, dim)], 1)
    close(twice(W), torch.stack([polar(W[:, i].movedim(dim, 0), method).movedim(0, dim) for i in range(2)], 1))


@every_method
@settings(max_examples=5)
@given(c=st.integers(1, 2), excess=excesses, seed=seeds)
def test_func_grad_is_the_gradient_mapped_or_not(method, c, excess, seed):
    W = weight(3, c + excess, c, seed=seed).requires_grad_()
    (truth,) = torch.autograd.grad(loss(W, method), W)
    W = W.detach()
    grad = torch.func.grad(loss)
    close(grad(W, method), truth)
    close(torch.func.vmap(grad, in_dims=(0, None))(W, method), truth)
    mapped_loss = torch.func.vmap(loss, in_dims=(0, None))
    close(torch.func.grad(lambda W: mapped_loss(W, method).sum())(W), truth)


@settings(max_examples=5)
@given(c=dims, excess=excesses, seed=seeds)
def test_jacrev_is_the_gradient_of_each_entry(c, excess, seed):
    """The backward pass is mapped over dL/dQ alone."""
    W = weight(1, c + excess, c, seed=seed)[0]
    for method in engines(c):
        jacobian = torch.func.jacrev(polar)(W, method)
        G = gaussian(*W.shape, seed=seed)
        close(torch.einsum("ij,ijkl->kl", G, jacobian), torch.func.vjp(lambda W, m=method: polar(W, m), W)[1](G)[0])


@every_method
def test_autocast_leaves_it_in_float32(method):
    W = weight(4, 600, 2, seed=0).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        Q = polar(W, method)
        backward_inside = torch.autograd.grad((Q**3).sum(), W, retain_graph=True)
    backward_outside = torch.autograd.grad((Q**3).sum(), W)
    assert Q.dtype == torch.float32
    close(Q, polar(W, method), atol=0, rtol=0)
    close(backward_outside, torch.autograd.grad(loss(W, method), W), atol=0, rtol=0)
    if method not in BASELINES:  # whose backward pass is autograd's, under the autocast it is called in
        close(backward_inside, backward_outside, atol=0, rtol=0)


@pytest.fixture
def medium():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@every_method
@pytest.mark.usefixtures("medium")
def test_a_lower_matmul_precision_changes_nothing(method):
    """Where a processor has bfloat16 products, "medium" would use them."""
    W = weight(4, 600, 2, seed=0).float()
    before = torch.backends.mkldnn.matmul.fp32_precision
    of_medium = polar(W, method), torch.func.grad(loss)(W, method)
    assert torch.get_float32_matmul_precision() == "medium"  # for everybody else
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    torch.set_float32_matmul_precision("highest")
    close(of_medium[0], polar(W, method), atol=0, rtol=0)
    if method not in BASELINES:  # whose backward pass is autograd's
        close(of_medium[1], torch.func.grad(loss)(W, method), atol=0, rtol=0)


@pytest.mark.usefixtures("medium")
def test_threads_do_not_lose_the_precision_that_was_set():
    before = torch.backends.mkldnn.matmul.fp32_precision
    W = weight(64, 64, 8, seed=0).float()
    threads = [threading.Thread(target=lambda: [polar(W, "quintic") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@every_method
def test_layers_that_use_it_are_copied_and_pickled(method):
    layer = Capsules("auto" if method == "closed" else method)
    u = layer(x())
    gradient = torch.autograd.grad(u.sum(), layer.weight, retain_graph=True)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        close(copied(x()), u)
        close(torch.autograd.grad(copied(x()).sum(), copied.weight), gradient)
    assert pickle.loads(pickle.dumps(polar)) is polar


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_penalty_trains_the_weight(compiled):
    """|dL/dx| is differentiated with respect to W and x. The paper's method, with autograd throughout, agrees."""

    def penalty(layer, x):
        lengths = layer(x).square().sum(-1)
        (dx,) = torch.autograd.grad(lengths.square().sum(), x, create_graph=True)
        return (dx.norm(dim=-1) - 1).square().mean()

    results = []
    for method in ("auto", "quintic", "paper"):
        layer, inputs = Capsules(method), x().requires_grad_()
        used = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
        results.append(torch.autograd.grad(penalty(used, inputs), (layer.weight, inputs)))
    for result in results[:-1]:
        close(result, results[-1], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(("dtype", "kappa"), [(torch.float32, 2), (torch.float32, 100), (torch.float64, 2)])
@pytest.mark.parametrize(("method", "c"), [("closed", 1), ("closed", 2), ("eigh", 3), ("svd", 3), ("quintic", 3)])
def test_operators_keep_their_promises_to_torch(method, c, dtype, kappa, by_rows):
    """Schema, shapes and strides without data, tracing with dynamic shapes. Autograd is not theirs but `polar`'s."""
    W = weight(2, 5, c, singular_values(c, kappa), seed=0).to(dtype)
    W = W.mT.contiguous().mT if by_rows else W
    saved = torch.ops.subcaps.polar(W, method)
    torch.library.opcheck(torch.ops.subcaps.polar.default, (W, method))
    torch.library.opcheck(torch.ops.subcaps.polar_gradient.default, (torch.ones_like(W), *saved, method))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@given(c=dims, excess=excesses, seed=seeds)
def test_it_is_the_same_without_gradients(mode, c, excess, seed):
    W = nn.Parameter(gaussian(2, c + excess, c, seed=seed).float())
    with mode():
        Q = polar(W)
    assert not Q.requires_grad
    close(Q, polar(W).detach(), atol=0, rtol=0)


@pytest.mark.parametrize("method", ["auto", *engines(1)])
def test_shapes_are_known_on_the_meta_device(method):
    W = torch.empty(4, 10, 2, device="meta")
    assert polar(W, method).shape == W.shape
    assert polar(W, method).is_meta
