"""What a GPU adds. The tests that take `device` run there too: the table of accuracy, the theorem, hostile matrices."""

from __future__ import annotations

import pytest
import torch

from subcaps import polar

from .reference import engines, gradient_of_Q, weight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

columns = pytest.mark.parametrize("c", [1, 2, 4, 16, 64])


def problem(c, d=128):
    W = weight(8, d, c, seed=c).float().cuda().mT.contiguous().mT.requires_grad_()
    return W, gradient_of_Q(W.detach().cpu(), c).cuda()


def forward_and_backward(W, G, method="auto"):
    Q = polar(W, method)
    return Q, *torch.autograd.grad(Q, W, G)


@columns
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_forward_and_backward_are_captured_in_a_cuda_graph(c):
    W, G = problem(c)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward_and_backward(W, G)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = forward_and_backward(W, G)
    with torch.no_grad():
        W.copy_(weight(8, 128, c, seed=c + 100).float())
    graph.replay()
    torch.testing.assert_close(replayed, forward_and_backward(W, G), atol=1e-5, rtol=1e-4)


@columns
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_is_not_waited_for(c, broken):
    """Nor is it where a matrix is NaN. "eigh" and "svd" do wait, and are not what "auto" picks for float32."""
    for method in ["auto", *["closed"] * (c <= 2), "quintic", "paper"]:
        assert_no_synchronisation(c, method, broken)


def assert_no_synchronisation(c, method, broken):
    W, G = problem(c)
    if broken:
        with torch.no_grad():
            W[0] = float("nan")
    forward_and_backward(W, G, method)
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = forward_and_backward(W, G, method)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result[1:].isfinite().all() for result in results)
    assert all(bool(result[0].isnan().all()) == broken for result in results)


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@columns
@pytest.mark.usefixtures("tf32")
def test_tf32_and_autocast_change_nothing(c):
    W, G = problem(c, d=576)
    methods = engines(c)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        lowered = [forward_and_backward(W, G, method) for method in methods]
        baseline = polar(W, "paper")  # its backward pass is autograd's
    assert torch.get_float32_matmul_precision() == "high"  # for everybody else
    assert torch.backends.cuda.matmul.allow_tf32
    torch.set_float32_matmul_precision("highest")
    for method, results in zip(methods, lowered, strict=True):
        torch.testing.assert_close(results, forward_and_backward(W, G, method), atol=0, rtol=0, msg=method)
    torch.testing.assert_close(baseline, polar(W, "paper"), atol=0, rtol=0)


@columns
def test_it_agrees_with_the_cpu(c):
    W, G = problem(c)
    on_cpu = forward_and_backward(W.detach().cpu().requires_grad_(), G.cpu())
    torch.testing.assert_close(forward_and_backward(W, G), tuple(result.cuda() for result in on_cpu), atol=1e-5, rtol=1e-4)
