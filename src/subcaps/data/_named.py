"""Named sets that lie prepared in a folder, and the one that comes with the package."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

EMBEDDED = "mnist-subset"
SPLITS = ("train", "test")


def load(name: str, split: str, root: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """The images (N, H, W, C) uint8 and labels (N,) int64 of one split of a named set.

    Args:
        name: `"mnist-subset"`, 5,000 training and 1,000 test images of MNIST that come with the package, or the name of a
            folder under `root` with `train.npz` and `test.npz`, each with the arrays `images` and `labels`.
        split: `"train"` or `"test"`.
        root: Where prepared sets lie; the environment variable SUBCAPS_DATA where it is not given.

    Example:
        >>> images, labels = load("mnist-subset", "train")
        >>> images.shape, labels.bincount().tolist()
        (torch.Size([5000, 28, 28, 1]), [500, 500, 500, 500, 500, 500, 500, 500, 500, 500])
    """
    if split not in SPLITS:
        raise ValueError(f"load: split={split!r}; choose 'train' or 'test'")
    if name == EMBEDDED:
        with resources.files("subcaps.data").joinpath("mnist_subset.npz").open("rb") as file:
            return _arrays(file, f"{split}_", EMBEDDED)
    root = root or os.environ.get("SUBCAPS_DATA")
    if root is None:
        raise ValueError(f"load: where does {name!r} lie? Give root=, or set SUBCAPS_DATA to the folder of prepared sets")
    path = Path(root) / name / f"{split}.npz"
    if not path.is_file():
        known = sorted(p.parent.name for p in Path(root).glob("*/train.npz"))
        raise FileNotFoundError(f"load: no {path}; {root} has {', '.join(known) or 'no prepared sets'}")
    with path.open("rb") as file:
        return _arrays(file, "", str(path))


def _arrays(file: IO[bytes], prefix: str, source: str) -> tuple[Tensor, Tensor]:
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("subcaps.data needs NumPy: pip install 'PATH/TO/CLONE[train]'") from error
    with np.load(file, allow_pickle=False) as arrays:
        missing = {f"{prefix}images", f"{prefix}labels"} - set(arrays.files)
        if missing:
            raise ValueError(f"load: {source} has no array {', '.join(sorted(missing))}")
        images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"]
    if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"load: {source} holds images {images.shape} {images.dtype} and labels {labels.shape}; "
            "images are (N, H, W, C) uint8, labels (N,)"
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
