import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from subcaps.measure import records
from subcaps.measure.records import Record, origin, read, short_name, write

FORM = ["name", "ours", "std", "values", "seeds", "unit", "better", "paper", "bound"]
FORM += ["command", "commit", "hardware", "torch", "wall_s"]


def record(name="mnist capsnet", ours=1.5, **fields):
    source = {} if ours is None else origin("subcaps reproduce mnist")
    return Record(**{"name": name, "ours": ours, "unit": "error %", "better": "lower", **source, **fields})


def test_a_file_reads_as_it_was_written(tmp_path):
    written = [
        record(std=0.1, values=(1.4, 1.6), seeds=(0, 1), paper=1.2, bound=2.0, wall_s=3.5),
        record("other", None),
    ]
    path = tmp_path / "new folder" / "mnist.json"
    write(path, written)
    assert read(path) == written
    assert [list(each) for each in json.loads(path.read_text())["records"]] == [FORM, FORM]


def test_a_record_takes_the_place_of_the_old_one_of_its_name(tmp_path):
    path = tmp_path / "mnist.json"
    write(path, [record("a"), record("b"), record("c")])
    write(path, [record("d"), record("b", ours=7.0)])
    assert [(each.name, each.ours) for each in read(path)] == [("a", 1.5), ("b", 7.0), ("c", 1.5), ("d", 1.5)]


def test_a_write_that_is_cut_short_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "mnist.json"
    write(path, [record()])

    def fail(*_):
        raise OSError("cut short")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="cut short"):
        write(path, [record(ours=9.0)])
    assert read(path) == [record()]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "MNIST capsnet"}, "lower-case words"),
        ({"name": "mnist  capsnet"}, "single spaces"),
        ({"better": "smaller"}, "'lower' or 'higher'"),
        ({"ours": float("nan")}, "not all finite"),
        ({"values": (1.0, float("inf"))}, "not all finite"),
        ({"hardware": None}, "origin"),
        ({"ours": None, "command": "subcaps reproduce mnist"}, "has an origin"),
    ],
)
def test_what_is_no_record_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        record(**fields)


@pytest.mark.parametrize("text", ["", "[]", '{"records": [{"name": "a"}]}', '{"records": [{"nme": "a"}]}'])
def test_what_is_no_file_of_records_is_named(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json is not of the form"):
        read(path)


def test_origin():
    source = origin("subcaps bench polar")
    assert source["command"] == "subcaps bench polar"
    assert source["hardware"].endswith(("core", "cores"))
    assert source["torch"] == torch.__version__


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commit_is_that_of_the_checkout_the_package_lies_in(tmp_path, monkeypatch):
    def git(*arguments):
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *author, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    module = tmp_path / "src" / "records.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(records, "__file__", str(module))
    assert origin("")["commit"] is None  # no checkout
    git("init")
    (tmp_path / "a").write_text("")
    git("add", "a")
    git("commit", "-m", "somebody else's project")
    assert origin("")["commit"] is None  # installed inside another checkout
    git("add", ".")
    git("commit", "-m", "ours")
    assert origin("")["commit"] == git("rev-parse", "HEAD").strip()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "polar.json").write_text("{}")
    assert origin("")["commit"] == git("rev-parse", "HEAD").strip()  # a result does not change what is measured
    module.write_text("changed")
    assert origin("")["commit"] == git("rev-parse", "HEAD").strip() + "-dirty"


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx 4090"),
    ],
)
def test_short_name(full, short, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: full)
    assert short_name("cuda") == short
    assert short_name("cpu") == "cpu"
