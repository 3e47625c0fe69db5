"""Turning chosen layers of any model into capsule layers, in place."""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subcaps.nn._conv import SubspaceConv1d, SubspaceConv2d, SubspaceConv3d
from subcaps.nn._head import CapsuleLength
from subcaps.nn._layer import SubspaceLayer
from subcaps.nn._linear import SubspaceLinear

Pattern = str | type[nn.Module]
Options = Mapping[str, Any] | Literal["drop"]
Patterns = Mapping[str, Options] | Mapping[type[nn.Module], Options] | Mapping[Pattern, Options]

_CONVERTED: dict[type[nn.Module], type[SubspaceLayer]] = {
    nn.Conv1d: SubspaceConv1d,
    nn.Conv2d: SubspaceConv2d,
    nn.Conv3d: SubspaceConv3d,
    nn.Linear: SubspaceLinear,
}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # of their layers, without calling them
_OPTIONS = ("types", "dim", "bias", "gain", "norm", "init_std", "activation", "fill")
_NULL = 1e-6  # a singular value below this share of the largest is none


@dataclass(frozen=True)
class Conversion:
    """One layer's change."""

    name: str
    before: str
    after: str
    parameters: int


@dataclass(frozen=True)
class Report:
    """What `convert` did; prints as a table."""

    rows: tuple[Conversion, ...]

    def __str__(self) -> str:
        head = ("layer", "before", "after", "parameters")
        cells = [head, *((row.name, row.before, row.after, f"{row.parameters:+,}") for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(4)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


@dataclass
class _Plan:
    names: list[str]
    old: nn.Module
    new: nn.Module
    weight: Tensor | None = None  # what becomes W, where it is not the old weight as it stands


def convert(model: nn.Module, patterns: Patterns) -> Report:
    """Make capsule layers of the layers that `patterns` choose, in place. Nothing changes if it cannot all be done.

    Args:
        model: Any module. Its chosen `Conv1d`, `Conv2d`, `Conv3d` and `Linear` keep their names, shapes and weights: the
            subspaces that the old weight's rows span become W. So a plain network's checkpoint loads into the result.
        patterns: From a layer's name, a glob over names, or a type, to what it becomes; the first pattern that fits a layer
            counts. Either `"drop"`, which makes the module an `Identity` (a norm or an activation that the capsules replace),
            or a dict of

            - `types`, `dim`: one of them, the other follows from the output channels. A `Linear` that becomes a classifier,
              `dict(types=classes, dim=4, activation=CapsuleLength)`, is given both and gets a fresh W.
            - `gain`, `norm`, `init_std`: as in the layer. With `gain=True` the gain keeps the size of each type's old weight.
            - `bias`: as in the layer; left out, an existing bias stays.
            - `activation`: a function of (types, dim), called once per layer: `Spark`, `lambda types, dim: Squash(dim)`.
            - `fill`: replace directions in which a type's old weight is zero by random ones; without it that is an error.

    Returns:
        A report that prints as a table.

    Example:
        >>> import subcaps
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        >>> print(subcaps.convert(net, {"0": dict(dim=2, activation=subcaps.nn.Spark), "1": "drop"}))
        layer  before        after                                      parameters
        -----  ------------  -----------------------------------------  ----------
        0      Conv2d(1, 8)  SubspaceConv2d(1, types=4, dim=2) + Spark  +4
        1      ReLU          Identity                                   +0
    """
    if not patterns:
        raise ValueError("convert: no patterns; give for instance {'layer4.*': dict(dim=2)}")
    chosen = _choose(model, patterns)
    plans = [_plan(names, module, options) for names, module, options in chosen]
    _refuse_shared_weights(model, plans)
    rows = []
    for plan in plans:
        before = sum(parameter.numel() for parameter in plan.old.parameters())
        _apply(model, plan)
        change = sum(parameter.numel() for parameter in plan.new.parameters()) - before
        rows.append(Conversion(plan.names[0], _describe(plan.old), _describe(plan.new), change))
    return Report(tuple(rows))


def _choose(model: nn.Module, patterns: Patterns) -> list[tuple[list[str], nn.Module, Options]]:
    """Every module that a pattern fits, once, with all of its names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    readers = {
        id(child): (names[id(parent)][0], type(parent).__name__)
        for parent in model.modules()
        if isinstance(parent, _READS_WEIGHTS)
        for child in parent.modules()
    }
    fitted: set[Pattern] = set()
    chosen = []
    for key, module in modules.items():
        for pattern, options in patterns.items():
            exact = isinstance(pattern, str) and pattern in names[key]
            if not exact and not _fits(pattern, names[key], module):
                continue
            if options != "drop" and not exact and not isinstance(module, (*_CONVERTED, *_TRANSPOSED)):
                continue  # a glob also fits the blocks, norms and activations around the layers
            if options != "drop" and not exact and isinstance(module, SubspaceLayer):
                continue
            fitted.add(pattern)
            if "" in names[key]:
                raise ValueError("convert: the pattern fits the model itself, which cannot be replaced in place; wrap it")
            if key in readers and options != "drop":
                raise ValueError(
                    f"convert: {names[key][0]!r} stands in the {readers[key][1]} {readers[key][0]!r}, which reads the weights "
                    "of its layers without calling them; its capsules would never be used"
                )
            chosen.append((names[key], module, options))
            break
    dropped = [name for found, _, options in chosen if options == "drop" for name in found]
    kept = []
    for found, module, options in chosen:
        outer = [drop for drop in dropped for name in found if name.startswith(f"{drop}.")]
        if outer and options != "drop":
            raise ValueError(f"convert: {found[0]!r} stands inside {outer[0]!r}, which is dropped; choose one of them")
        if not outer:
            kept.append((found, module, options))
    for pattern in patterns:
        if pattern not in fitted and not any(_fits(pattern, found, module) for found, module, _ in chosen):
            close = difflib.get_close_matches(str(pattern), [name for found in names.values() for name in found], n=3)
            near = f"; the nearest names are {', '.join(map(repr, close))}" if close else ""
            raise ValueError(f"convert: no layer fits the pattern {pattern!r}{near}")
    return kept


def _fits(pattern: Pattern, names: list[str], module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)
    if not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
        raise TypeError(f"convert: pattern {pattern!r}; give a name, a glob or a module class")
    return isinstance(module, pattern)


def _plan(names: list[str], old: nn.Module, options: Options) -> _Plan:
    name = names[0]
    if options == "drop":
        return _Plan(names, old, nn.Identity())
    if not isinstance(options, Mapping):
        raise TypeError(f"convert: {name!r}: options are a dict or 'drop', not {options!r}")
    for option in options:
        if option not in _OPTIONS:
            close = difflib.get_close_matches(option, _OPTIONS, n=1, cutoff=0)
            raise ValueError(f"convert: {name!r}: unknown option {option!r}; did you mean {close[0]!r}?")
    plain = _plain_type(name, old)
    types, dim = _types_and_dim(name, old, options)
    weight = old.weight
    assert isinstance(weight, Tensor)
    fresh = types * dim != len(weight)
    d = weight[0].numel()
    if dim > d:
        raise ValueError(f"convert: {name!r}: dim={dim} is larger than the {d} weights of an output channel; give at most {d}")
    bias = options.get("bias", getattr(old, "bias", None) is not None)
    keywords = {key: options[key] for key in ("gain", "norm", "init_std") if key in options}
    keywords |= {"bias": bias, "activation": _activation(name, options.get("activation"), types, dim, old)}
    try:
        new = _build(plain, old, types, dim, keywords)
    except ValueError as error:
        raise ValueError(f"convert: {name!r}: {error}") from error
    new.to(device=weight.device, dtype=weight.dtype)
    new.train(old.training)
    if fresh:
        return _Plan(names, old, new)
    with torch.no_grad():
        W = weight.detach().reshape(types, dim, d).mT
        W_filled = _of_full_rank(name, W, bool(options.get("fill")))
        if (std := options.get("init_std")) is not None:
            size = torch.linalg.matrix_norm(W_filled, keepdim=True)
            W_filled = W_filled * (std * math.sqrt(d * dim) / size)
        if new.gain is not None:
            new.gain.copy_(torch.linalg.matrix_norm(W) / math.sqrt(dim))
        if isinstance(old_bias := getattr(old, "bias", None), Tensor) and new.bias is not None:
            if len(new.bias) == len(old_bias):
                new.bias = old_bias
            else:
                new.bias.copy_(old_bias.view(types, dim).mean(1))
    new.weight = weight
    changed = W_filled is not W
    return _Plan(names, old, new, W_filled.mT.reshape(weight.shape) if changed else None)


def _plain_type(name: str, old: nn.Module) -> type[nn.Module]:
    if isinstance(old, SubspaceLayer):
        raise ValueError(f"convert: {name!r} is a {type(old).__name__} already")
    if isinstance(old, _TRANSPOSED):
        raise ValueError(
            f"convert: {name!r} is a {type(old).__name__}; an output of a transposed convolution sees only some of its taps, so "
            "there is no projection. Upsample and convert a convolution instead"
        )
    for plain in _CONVERTED:
        if not isinstance(old, plain):
            continue
        if isinstance(old.weight, nn.parameter.UninitializedParameter):
            raise ValueError(f"convert: {name!r} has no weight yet; run the model once on a batch first")
        own = [
            method for method in ("forward", "_conv_forward") if getattr(type(old), method, 0) is not getattr(plain, method, 0)
        ]
        if own:
            raise ValueError(
                f"convert: {name!r} is a {type(old).__name__}, a {plain.__name__} with a forward of its own, which would be lost"
            )
        if "weight" not in old._parameters:
            raise ValueError(
                f"convert: the weight of {name!r} is parametrised; convert first, then parametrise the capsule layer's weight"
            )
        if old._forward_hooks or old._forward_pre_hooks or old._backward_hooks or old._backward_pre_hooks:
            raise ValueError(f"convert: {name!r} has hooks, which would be lost; convert first, then register them")
        return plain
    raise ValueError(f"convert: {name!r} is a {type(old).__name__}; only Conv1d, Conv2d, Conv3d and Linear can be converted")


def _types_and_dim(name: str, old: nn.Module, options: Mapping[str, Any]) -> tuple[int, int]:
    weight = old.weight
    assert isinstance(weight, Tensor)
    width = len(weight)
    types, dim = options.get("types"), options.get("dim")
    if types is None and dim is None:
        raise ValueError(f"convert: {name!r}: give `types` or `dim`; the layer has {width} output channels")
    for option, value in (("types", types), ("dim", dim)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"convert: {name!r}: {option}={value!r}; give a whole number of at least 1")
        if value is not None and (types is None or dim is None) and width % value:
            raise ValueError(f"convert: {name!r}: {option}={value} does not divide the layer's {width} output channels")
    if types is None:
        types = width // dim  # type: ignore[operator]
    if dim is None:
        dim = width // types
    if types * dim == width:
        return types, dim
    if isinstance(old, nn.Linear) and types == width and options.get("activation") is not None:
        return types, dim  # a classifier's new head: `_activation` sees to it that its lengths are the scores
    raise ValueError(
        f"convert: {name!r}: types={types} times dim={dim} is not the layer's width of {width}. Only a Linear that becomes a "
        f"classifier may have another: dict(types={width}, dim={dim}, activation=CapsuleLength)"
    )


def _activation(
    name: str, make: Callable[[int, int], nn.Module] | None, types: int, dim: int, old: nn.Module
) -> nn.Module | None:
    if make is None:
        return None
    if isinstance(make, nn.Module):
        raise TypeError(
            f"convert: {name!r}: activation is an instance, which layers would share; give a function of (types, dim), "
            f"such as Spark or `lambda types, dim: Squash(dim)`"
        )
    try:
        activation = make(types, dim)
    except TypeError as error:
        raise TypeError(f"convert: {name!r}: activation is called with (types, dim) and failed: {error}") from error
    if not isinstance(activation, nn.Module):
        raise TypeError(f"convert: {name!r}: activation made {activation!r}; it must make a module")
    width = len(old.weight)  # type: ignore[arg-type]
    if isinstance(activation, CapsuleLength) and isinstance(old, nn.Linear):
        if types == width:
            return activation
        raise ValueError(
            f"convert: {name!r}: CapsuleLength answers {types} numbers where the layer answered {width}; give types={width}"
        )
    rank = old.weight.ndim - 2  # type: ignore[operator]
    training = activation.training
    assert isinstance(old.weight, Tensor)
    activation.to(old.weight.device, old.weight.dtype)
    with torch.no_grad():
        answer = activation.eval()(old.weight.new_zeros(1, types * dim, *[1] * rank))
    activation.train(training)
    answered = answer.shape[1] if isinstance(answer, Tensor) else 0
    if answered != width:
        raise ValueError(
            f"convert: {name!r}: {type(activation).__name__} makes {answered} channels of {types * dim}, and what follows "
            f"expects {width}; build the network with it instead"
        )
    return activation


def _build(plain: type[nn.Module], old: Any, types: int, dim: int, keywords: dict[str, Any]) -> Any:
    layer = _CONVERTED[plain]
    if plain is nn.Linear:
        return layer(old.in_features, types, dim, **keywords)
    geometry = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    keywords |= {key: getattr(old, key) for key in geometry}
    return layer(old.in_channels, types, dim, **keywords)


def _of_full_rank(name: str, W: Tensor, fill: bool) -> Tensor:
    """W (types, d, dim), the directions in which a type is zero replaced by orthonormal ones if `fill`."""
    U, h, Vh = torch.linalg.svd(W.cpu().double(), full_matrices=False)
    null = h <= _NULL * h.amax(-1, keepdim=True)
    if not null.any():
        return W
    if not fill:
        deficient = null.any(-1).nonzero().flatten().tolist()
        shown = ", ".join(map(str, deficient[:8])) + (", ..." if len(deficient) > 8 else "")
        raise ValueError(
            f"convert: {name!r}: the weights of {len(deficient)} of {len(W)} types span fewer than dim={W.shape[-1]} dimensions "
            f"(types {shown}); fill=True replaces the missing directions by random ones"
        )
    kept = torch.where(null, 0.0, h)
    typical = kept.sum(-1, keepdim=True) / (~null).sum(-1, keepdim=True).clamp(min=1)
    typical = torch.where(typical == 0, 1.0, typical)
    # the null columns are the last ones: QR leaves those before them alone and makes random ones orthonormal to them
    random, _ = torch.linalg.qr(torch.where(null.unsqueeze(-2), torch.randn_like(U), U))
    U = torch.where(null.unsqueeze(-2), random, U)
    return ((U * torch.where(null, typical, h).unsqueeze(-2)) @ Vh).to(W)


def _refuse_shared_weights(model: nn.Module, plans: list[_Plan]) -> None:
    """A weight that is also read elsewhere would be W here and a plain weight there."""
    converted = [plan for plan in plans if isinstance(plan.new, SubspaceLayer)]
    weights: dict[int, _Plan] = {}
    for plan in converted:
        other = weights.setdefault(id(plan.old.weight), plan)
        alike = [(p.new.types, p.new.dim, p.new.init_std, p.new.weight is p.old.weight) for p in (plan, other)]
        if other is not plan and (alike[0] != alike[1] or not alike[0][3]):
            raise ValueError(
                f"convert: {plan.names[0]!r} and {other.names[0]!r} share a weight and would make different capsules of it; "
                "give both the same types, dim and init_std"
            )
    replaced = {id(module) for plan in plans for module in plan.old.modules()}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if id(parameter) in weights and id(module) not in replaced:
                raise ValueError(
                    f"convert: {weights[id(parameter)].names[0]!r} shares its weight with {name!r}, which is not converted"
                )


def _apply(model: nn.Module, plan: _Plan) -> None:
    if plan.weight is not None:
        with torch.no_grad():
            plan.new.weight.copy_(plan.weight)  # type: ignore[operator]
    for name in plan.names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plan.new)


def _describe(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, SubspaceLayer):
        inputs = getattr(module, "in_channels", None) or getattr(module, "in_features", None)
        extra = "".join(f", {name}=True" for name in ("gain", "norm") if getattr(module, name) is not None)
        text = f"{kind}({inputs}, types={module.types}, dim={module.dim}{extra})"
        return text if module.activation is None else f"{text} + {type(module.activation).__name__}"
    if isinstance(module, nn.Linear):
        return f"{kind}({module.in_features}, {module.out_features})"
    if isinstance(module, tuple(_CONVERTED)):
        return f"{kind}({module.in_channels}, {module.out_channels})"
    return kind
