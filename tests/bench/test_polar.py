import contextlib
import importlib.util
import io
import sys

import pytest
import torch

from subcaps.bench import polar, polar_table
from subcaps.bench.polar_rows import Errors, Row, Shape, bench
from subcaps.bench.timing import Timing
from subcaps.measure.records import origin, read

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What `subcaps bench polar --quick --out FILE` prints, and the file."""
    path, printed = tmp_path_factory.mktemp("results") / "polar.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        polar.run("cpu", str(path), quick=True)
    return printed.getvalue(), path


def test_writes_valid_records(quick):
    _, path = quick
    records = {record.name: record for record in read(path)}
    for method in (
        "auto",
        "auto kappa 100",
        "closed",
        "eigh",
        "quintic",
        "svd",
        "paper",
        "authors",
        "qr",
        "torch cayley",
    ):
        record = records[f"projection 3x18x2 {method} cpu"]
        assert record.ours > 0
        assert (record.unit, record.better) == ("ms", "lower")
        assert record.command == "subcaps bench polar --quick"
    assert records["projection matmul float32 cpu"].unit == "GFLOP/s"


def test_prints_a_table_for_each_shape_and_the_aims(quick):
    printed, _ = quick
    assert "3 x 18 x 2" in printed
    assert "2 x 12 x 4" in printed
    assert "times faster than the best" in printed
    assert "fastest other in bounds" in printed


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_draws_a_figure_beside_the_records(quick):
    _, path = quick
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    polar._draw([], "", tmp_path / "polar.png")
    assert capsys.readouterr().out.endswith("pip install 'PATH/TO/CLONE[train]'\n")


def test_methods_that_return_the_polar_factor_are_told_from_those_that_do_not():
    rows = bench(Shape(2, 24, 2), CPU, rounds=1, seconds=0.0)
    found = {name for name, row in rows.items() if row.is_polar}
    exact = {
        "auto",
        "auto again",
        "auto kappa 100",
        "closed",
        "eigh",
        "quintic",
        "svd",
        "paper",
        "authors",
        "eigh autograd",
    }
    assert found - {"orthogonium bjorck"} == exact
    assert rows["torch householder"].errors.orthonormality < 1e-5


def test_what_would_be_too_large_is_not_started():
    rows = bench(Shape(300, 2304, 1), CPU, rounds=1, seconds=0.0, only=("auto", "torch cayley"))
    assert rows["torch cayley"].note == "not run: needs 59 GiB, over 8"
    assert not rows["torch cayley"].timings
    record = polar._records(Shape(300, 2304, 1), rows, "cpu", origin("test"))["projection 300x2304x1 torch cayley cpu"]
    assert record.ours is None


def test_no_cuda_device_is_a_readable_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="finds no CUDA device here"):
        polar.run("cuda")


def rows_of(**ms):
    exact, other = Errors(1e-7, 1e-7, 1e-7), Errors(1e-7, 2e-7, 1e-7)
    same = ("auto", "again", "its_engine")
    return {name: Row(exact if name in same else other, {"": Timing([time])}) for name, time in ms.items()} | {
        "tall products": Row(None, {"": Timing([0.1])})
    }


@pytest.mark.parametrize(
    ("ms", "faster", "no_slower"),
    [
        ({"auto": 1.0, "paper": 5.1, "its_engine": 1.0}, "met", "met"),
        ({"auto": 1.0, "paper": 4.9, "its_engine": 0.9}, "missed", "met"),
        ({"auto": 1.0, "paper": 9.0, "rival": 0.98}, "met", "met"),  # within noise
        ({"auto": 1.0, "paper": 9.0, "rival": 0.8}, "met", "missed"),
        ({"auto": 1.0, "paper": 9.0, "rival": 0.8, "again": 0.75}, "met", "met"),  # the noise is as large
    ],
)
def test_an_aim_is_met_or_missed(ms, faster, no_slower):
    shape, machine = Shape(64, 1152, 2, "SVHN conv"), Timing([100.0])
    against_paper, _, against_others = polar_table.summary({shape: rows_of(**ms)}, "", machine, machine).split("\n\n")
    assert against_paper.splitlines()[-1].split("|")[-2].strip() == faster
    assert against_others.splitlines()[-1].split("|")[-2].strip() == no_slower
