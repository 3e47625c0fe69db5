"""Looking into a network with capsules: what its layers answer, which parameters are which."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from subcaps.nn._activation import Spark
from subcaps.nn._head import CapsuleLength
from subcaps.nn._layer import SubspaceLayer, leaves


def capsules(model: nn.Module, x: Any) -> dict[str, Tensor]:
    """What every capsule layer of `model` answers to `x`, before its activation: {name: (N, types, dim, ...)}.

    Of a layer that is called several times, the last answer. The model runs as it is: call `model.eval()` first.

    Example:
        >>> import subcaps, torch
        >>> net = nn.Sequential(subcaps.nn.SubspaceConv2d(3, types=4, dim=2, kernel_size=3))
        >>> {name: tuple(u.shape) for name, u in subcaps.capsules(net, torch.zeros(1, 3, 8, 8)).items()}
        {'0': (1, 4, 2, 6, 6)}
    """
    answers: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SubspaceLayer)}

    def recorder(name: str, layer: Any) -> Any:
        def record(*args: Any) -> Tensor:
            u: Tensor = type(layer).capsules(layer, *args)
            channels = u.ndim - 1 if isinstance(layer, nn.Linear) else 1
            answers[name] = u.unflatten(channels, (layer.types, layer.dim))
            return u

        return record

    try:
        for name, layer in layers.items():
            object.__setattr__(layer, "capsules", recorder(name, layer))
        model(x)
    finally:
        for layer in layers.values():
            layer.__dict__.pop("capsules", None)
    return answers


def param_groups(model: nn.Module, weight_decay: float = 0.0, subspace_weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, each with its `name`: "subspaces" (every W), "scalars" (gains, thresholds, scales and
    offsets of lengths, biases and norms: not decayed) and "rest".

    A projection does not see the size of W, so decaying W does not shrink the function: it sets how fast the optimizer turns
    the subspace, as under weight normalisation. Without decay W only grows under SGD, and turns ever slower. By default W has
    the decay of the rest; choose `subspace_weight_decay` knowingly.

    Example:
        >>> import subcaps
        >>> net = nn.Sequential(subcaps.nn.SubspaceLinear(8, types=2, dim=2, gain=True), nn.Linear(4, 2))
        >>> [(group["name"], len(group["params"])) for group in subcaps.param_groups(net, weight_decay=1e-4)]
        [('subspaces', 1), ('scalars', 2), ('rest', 1)]
    """
    subspaces, scalars, rest = [], [], []
    seen: set[int] = set()
    of_W = {id(leaf) for module in model.modules() if isinstance(module, SubspaceLayer) for leaf in leaves(module)}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if id(parameter) in of_W:
                subspaces.append(parameter)
            elif parameter.ndim <= 1 or isinstance(module, (Spark, CapsuleLength)):
                scalars.append(parameter)
            else:
                rest.append(parameter)
    decay = weight_decay if subspace_weight_decay is None else subspace_weight_decay
    groups = [
        {"name": "subspaces", "params": subspaces, "weight_decay": decay},
        {"name": "scalars", "params": scalars, "weight_decay": 0.0},
        {"name": "rest", "params": rest, "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]
