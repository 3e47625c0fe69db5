"""The networks have the sizes that their papers give, and learn."""

import pytest
import torch

from subcaps.models import MnistCNN, ResNetCifar


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (56, 853_018), (110, 1_727_962)])
def test_a_resnet_has_the_parameters_of_he_et_al(depth, parameters):
    assert sum(p.numel() for p in ResNetCifar(depth).parameters()) == parameters


def test_a_depth_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"depth=21 is not 6 n \+ 2"):
        ResNetCifar(21)


@pytest.mark.parametrize(("make", "shape"), [(MnistCNN, (1, 28, 28)), (lambda: ResNetCifar(8), (3, 32, 32))])
def test_a_network_learns_a_batch_by_heart(make, shape):
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(10, *shape), torch.arange(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert (model(x).argmax(1) == y).all()
