import warnings

import pytest
import torch


@pytest.fixture(scope="session")
def cuda():
    """The GPU, after the first matrix product in torch's thread of backward passes, of which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        W = torch.eye(2, device="cuda", requires_grad=True)
        (W @ W).sum().backward()
    return "cuda"


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A test that takes it runs on the CPU, and on a GPU under the marker `gpu`."""
    return request.getfixturevalue("cuda") if request.param == "cuda" else "cpu"
