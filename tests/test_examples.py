"""The example that `make demo` runs, in small."""

import subprocess
import sys
from pathlib import Path

from subcaps.measure.records import read

ROOT = Path(__file__).parents[1]


def test_the_first_example_compares_draws_and_records(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "first.py"), "--epochs", "1", "--out", "demo.json"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "SCN, fused" in shown
    assert (tmp_path / "demo" / "capsules.png").stat().st_size > 10_000
    records = {record.name: record for record in read(tmp_path / "demo.json")}
    assert set(records) == {f"mnist-subset mnist-cnn {kind} 1 epochs cpu" for kind in ("cnn", "scn", "scn fused")}
    # one epoch is enough to tell that both learn (guessing errs on 90%), and the fused network is the same function
    assert all(record.ours < 60 for record in records.values())
    fused, scn = (records[f"mnist-subset mnist-cnn {kind} 1 epochs cpu"].ours for kind in ("scn fused", "scn"))
    assert abs(fused - scn) <= 0.2
