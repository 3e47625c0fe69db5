"""What reads capsules: the mean over a field, lengths as scores, the longest one."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from projection.reference import gaussian, seeds

from subcaps.nn import CapsuleLength, CapsuleMeanPool2d, CapsuleSelect, SubspaceLinear
from subcaps.nn.functional import as_capsules, lengths

close = torch.testing.assert_close

counts = st.integers(1, 5)


@given(batch=counts, types=counts, dim=counts, size=st.integers(1, 3), seed=seeds)
def test_the_pool_is_the_mean_capsule_of_each_window(batch, types, dim, size, seed):
    u = gaussian(batch, types * dim, 2 * size, 2 * size, seed=seed)
    pooled = as_capsules(CapsuleMeanPool2d(size)(u), dim)
    close(pooled[..., 0, 1], as_capsules(u, dim)[..., :size, size:].mean((-1, -2)))
    close(CapsuleMeanPool2d(size, stride=1, padding=0)(u)[..., 0, 0], CapsuleMeanPool2d(size)(u)[..., 0, 0])


@given(batch=counts, types=counts, dim=counts, seed=seeds)
def test_scores_are_lengths_scaled_and_offset(batch, types, dim, seed):
    u = gaussian(batch, types * dim, seed=seed)
    length = lengths(u, dim)
    close(CapsuleLength(types, dim)(u), length)
    scores = CapsuleLength(types, dim, scale=4, offset=-1.0)(u)
    close(scores, 4 * length - 1)
    close(scores.argmax(1), length.argmax(1))
    per_type = CapsuleLength(types, dim, scale=4, offset=-1.0, per_type=True)
    close(per_type(u), scores)
    with torch.no_grad():
        per_type.scale.copy_(torch.arange(types))
    close(per_type(u), length * torch.arange(types) - 1)


@given(batch=counts, types=counts, dim=counts, seed=seeds, per_type=st.booleans())
def test_scores_of_a_field_are_taken_at_every_place(batch, types, dim, seed, per_type):
    u = gaussian(batch, types * dim, 2, 3, seed=seed)
    head = CapsuleLength(types, dim, scale=2.0, offset=0.5, per_type=per_type)
    close(head(u)[..., 1, 2], head(u[..., 1, 2]))


@pytest.mark.parametrize(("per_type", "shape"), [(False, ()), (True, (3,))])
def test_only_what_is_asked_for_is_learned(per_type, shape):
    assert not list(CapsuleLength(3, 2).parameters())
    for name in ("scale", "offset"):
        (learned,) = CapsuleLength(3, 2, **{name: 4.0}, per_type=per_type).named_parameters()
        assert learned[0] == name
        close(learned[1].detach(), torch.full(shape, 4.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_lower_precisions_are_float32(dtype):
    u = torch.randn(3, 6).to(dtype)
    scores = CapsuleLength(3, 2)(u)
    assert scores.dtype == torch.float32
    close(scores, lengths(u.float(), 2))


def test_scores_of_silent_capsules_have_a_finite_gradient():
    u = torch.zeros(2, 6, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(CapsuleLength(3, 2, scale=4.0)(u), torch.tensor([0, 1]))
    assert torch.autograd.grad(loss, u)[0].isfinite().all()


@given(batch=counts, types=counts, dim=counts, seed=seeds)
def test_the_longest_capsule_is_selected(batch, types, dim, seed):
    u = gaussian(batch, types * dim, seed=seed).requires_grad_()
    capsule, index = CapsuleSelect(types, dim)(u)
    close(index, lengths(u, dim).argmax(1))
    close(capsule, as_capsules(u, dim)[torch.arange(batch), index])
    (du,) = torch.autograd.grad(capsule.sum(), u)
    close(as_capsules(du, dim).sum(2), dim * torch.nn.functional.one_hot(index, types).to(du))


@given(types=counts, seed=seeds)
def test_a_selected_capsule_is_lifted_back(types, seed):
    """The generator's first layer: the projection of z onto the nearest subspace."""
    layer = SubspaceLinear(7, types, dim=2)
    z = gaussian(4, 7, seed=seed).float()
    capsule, index = CapsuleSelect(types, 2)(layer(z))
    Q = layer.subspaces()[index]
    close(layer.lift(capsule, index), (Q @ Q.mT @ z[..., None]).squeeze(-1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: CapsuleLength(3, 2)(torch.zeros(4, 5)),
            "CapsuleLength(3, 2) takes (N, 6, ...), types * dim channels; got (4, 5)",
        ),
        (lambda: CapsuleSelect(3, 2)(torch.zeros(4, 5)), "CapsuleSelect(3, 2) takes (N, 6, ...)"),
        (lambda: CapsuleSelect(3, 2)(torch.zeros(4, 6, 2)), "CapsuleSelect takes (N, 6); got (4, 6, 2)"),
    ],
)
def test_an_error_says_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_they_print_their_arguments():
    assert str(CapsuleLength(3, 2)) == "CapsuleLength(3, 2)"
    assert str(CapsuleLength(3, 2, scale=1, offset=0, per_type=True)).endswith("learned scale, learned offset, per_type=True)")
    assert str(CapsuleSelect(3, 2)) == "CapsuleSelect(3, 2)"


def test_nothing_to_learn_per_type_is_refused():
    with pytest.raises(ValueError, match="per_type=True, but neither scale= nor offset= is given"):
        CapsuleLength(4, 2, per_type=True)
