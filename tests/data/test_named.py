"""Named sets: the embedded one, prepared ones, and what is said of those that are missing or broken."""

import numpy as np
import pytest
import torch

from subcaps.data import load


@pytest.mark.parametrize(("split", "per_class"), [("train", 500), ("test", 100)])
def test_the_embedded_set_is_balanced(split, per_class):
    images, labels = load("mnist-subset", split)
    assert images.shape == (10 * per_class, 28, 28, 1)
    assert images.dtype == torch.uint8
    assert labels.bincount().tolist() == [per_class] * 10


def prepared(folder, **arrays):
    (folder / "mine").mkdir()
    np.savez(folder / "mine" / "train.npz", **arrays)


def test_a_prepared_set_is_found_by_flag_and_by_environment(tmp_path, monkeypatch):
    images = np.arange(2 * 3 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 3)
    prepared(tmp_path, images=images, labels=np.array([1, 0], np.uint8))
    monkeypatch.setenv("SUBCAPS_DATA", str(tmp_path))
    for root in (tmp_path, None):
        loaded, labels = load("mine", "train", root)
        assert torch.equal(loaded, torch.from_numpy(images))
        assert labels.tolist() == [1, 0]


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("SUBCAPS_DATA", raising=False)
    with pytest.raises(ValueError, match="split='val'; choose"):
        load("mnist-subset", "val")
    with pytest.raises(ValueError, match="Give root=, or set SUBCAPS_DATA"):
        load("cifar10", "train")
    prepared(tmp_path, images=np.zeros((1, 2, 2, 1), np.uint8), labels=np.zeros(1))
    with pytest.raises(FileNotFoundError, match="has mine"):
        load("cifar10", "train", tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (dict(images=np.zeros((1, 2, 2, 1), np.uint8)), "has no array labels"),
        (dict(images=np.zeros((1, 2, 2, 1)), labels=np.zeros(1)), r"images are \(N, H, W, C\) uint8"),
        (dict(images=np.zeros((2, 2, 2, 1), np.uint8), labels=np.zeros(1)), r"labels \(N,\)"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, arrays, message):
    prepared(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message):
        load("mine", "train", tmp_path)


def test_a_file_cannot_execute_code(tmp_path):
    prepared(tmp_path, images=np.array([print], dtype=object), labels=np.zeros(1))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load("mine", "train", tmp_path)
