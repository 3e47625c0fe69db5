"""`bench layers` in small: every row has a record, in the form that readers and scripts compare."""

import warnings

from subcaps.bench.layers import run
from subcaps.measure.records import read


def test_every_row_is_measured_and_recorded(tmp_path, capsys):
    path = tmp_path / "layers.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's, of a machine without a GPU
        run("cpu", str(path), quick=True)
    names = [record.name for record in read(path)]
    for begin in ("relu", "spark", "squash", "step", "memory", "fused"):
        assert any(name.startswith(begin) for name in names), begin
    assert all(name.endswith(" cpu") for name in names)
    printed = capsys.readouterr().out
    assert "x relu (aim 3:" in printed
    assert "beyond the projection (aim 0.1:" in printed


def test_quick_writes_nothing_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("cpu", quick=True)
    assert not list(tmp_path.iterdir())
