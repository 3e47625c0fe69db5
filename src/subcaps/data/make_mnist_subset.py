"""Make `mnist_subset.npz`, the set that comes with the package, from MNIST's four idx files.

    python -m subcaps.data.make_mnist_subset FOLDER

takes 500 training and 100 test images of every digit at random (seed 0). The files may be packed as .gz or .xz.
"""

from __future__ import annotations

import gzip
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_name("mnist_subset.npz")
PER_CLASS = {"train": ("train", 500), "test": ("t10k", 100)}


def read_idx(folder: Path, name: str) -> Any:
    """One idx file as an array of bytes."""
    for suffix, opener in (("", open), (".gz", gzip.open), (".xz", lzma.open)):
        path = folder / (name + suffix)
        if path.is_file():
            with opener(path, "rb") as file:
                raw = file.read()
            shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    raise SystemExit(f"no {name}, {name}.gz or {name}.xz in {folder}")


def main(folder: Path) -> None:
    """Write the subset beside this file."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for split, (stem, count) in PER_CLASS.items():
        images = read_idx(folder, f"{stem}-images-idx3-ubyte")
        labels = read_idx(folder, f"{stem}-labels-idx1-ubyte")
        chosen = np.sort(
            np.concatenate([random.choice(np.flatnonzero(labels == digit), count, replace=False) for digit in range(10)])
        )
        arrays |= {f"{split}_images": images[chosen][..., None], f"{split}_labels": labels[chosen]}
    np.savez_compressed(OUT, **arrays)
    print(OUT, f"{OUT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
