import time

import torch

from subcaps.bench.timing import FEWEST, alternate, matmul_rate, too_costly

CPU = torch.device("cpu")


def test_methods_take_turns():
    order = []
    calls = {name: lambda name=name: (order.append(name), time.sleep(0.003)) for name in "ab"}
    alternate(calls, CPU, rounds=4, seconds=1.0)
    assert "".join(order) == "ab" * 4


def test_a_slow_method_leaves_after_the_fewest_samples():
    calls = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.003)}
    timings = alternate(calls, CPU, rounds=8, seconds=0.03)
    assert len(timings["slow"].values) == FEWEST
    assert len(timings["fast"].values) > FEWEST
    assert timings["slow"].median >= 20
    assert timings["slow"].wall_s >= FEWEST * 0.02


def test_a_sample_of_a_fast_method_is_the_mean_of_many_calls():
    count = 0

    def call():
        nonlocal count
        count += 1

    timing = alternate({"": call}, CPU, rounds=3, seconds=1.0)[""]
    assert len(timing.values) == 3
    assert count > 30
    assert timing.std is not None


def test_what_would_be_too_costly():
    assert too_costly(seconds=14, gibibytes=7.9) is None
    assert too_costly(seconds=16, gibibytes=0) == "not run: needs 4 calls of 16 s, over 60 s"
    assert too_costly(seconds=0, gibibytes=20) == "not run: needs 20 GiB, over 8"


def test_rate_is_in_gflops():
    assert 0.001 < matmul_rate(CPU, rounds=2, side=128).median < 1e6
