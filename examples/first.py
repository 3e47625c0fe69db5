"""The first thing to run: a small CNN and its capsule twin on digits, side by side, on the CPU.

    python examples/first.py

trains both for a minute, prints a table and draws `demo/capsules.png`: what the trained capsules answer to.
`--seeds 5 --out results/demo.json` makes the record of that name.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import subcaps
from subcaps.bench.timing import alternate
from subcaps.measure.records import Record, origin, write
from subcaps.models import MnistCNN
from subcaps.nn import CapsuleLength, Spark

BATCH, RATE = 100, 3e-3
CAPSULES = {
    "conv3": dict(dim=4, norm=True, activation=partial(Spark, leak=0.2)),  # 16 types of 4-dimensional capsules
    "norm3": "drop",
    "relu3": "drop",
    "head": dict(types=10, dim=4, activation=partial(CapsuleLength, scale=4.0)),  # a capsule per digit: its length is the score
}


def digits(split):
    """Images (N, 1, 28, 28) with mean 0 and deviation 1, and labels."""
    images, labels = subcaps.data.load("mnist-subset", split)
    return (images.permute(0, 3, 1, 2) / 255 - 0.13) / 0.31, labels


def build(seed):
    """A CNN, and the SCN that `convert` makes of the same CNN."""
    torch.manual_seed(seed)
    cnn, scn = MnistCNN(), MnistCNN()
    subcaps.convert(scn, CAPSULES)
    subcaps.calibrate(scn, digits("train")[0][:500])
    return {"CNN": cnn, "SCN": scn}


def train(model, x, labels, epochs, seed, progress, name):
    """The same schedule for both; returns the median milliseconds of a step."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(subcaps.param_groups(model, weight_decay=1e-4), lr=RATE)
    steps = epochs * len(x) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps)
    took = []
    for step in progress.track(range(steps), description=name):
        if step % (len(x) // BATCH) == 0:
            order = torch.randperm(len(x), generator=random)
        rows = order[step * BATCH % len(x) :][:BATCH]
        begin = time.perf_counter()
        with subcaps.projected(model):  # every projection is computed once per step
            loss = F.cross_entropy(model(x[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        took.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(took)


@torch.no_grad()
def error(model, x, labels):
    """Percent of the images that are not recognised."""
    return 100 * (model.eval()(x).argmax(1) != labels).double().mean().item()


@torch.no_grad()
def draw(model, x, labels, path):
    """Which capsule lights up for which digit, and what one capsule's direction says."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    capsules = subcaps.capsules(model, x)["head"]  # (N, 10, 4)
    lengths = capsules.norm(dim=2)
    answers = torch.stack([lengths[labels == digit].mean(0) for digit in range(10)])

    slants = torch.linspace(-0.6, 0.6, 24)  # pixels to the side per pixel of height; without 0, which alone is not blurred

    def slanted_capsule(digit):
        images = x[labels == digit]
        own = subcaps.capsules(model, torch.cat([slant(images, amount.item()) for amount in slants]))["head"][:, digit]
        return own.view(len(slants), len(images), -1)

    def turn(digit):  # between the mean directions at both ends
        ends = F.normalize(slanted_capsule(digit)[[0, -1]], dim=2).mean(1)
        return -F.cosine_similarity(*ends, dim=0)

    shown = max(range(10), key=turn)
    images, own = x[labels == shown], slanted_capsule(shown)
    length = own.norm(dim=2)
    direction = own / length.unsqueeze(2)

    figure = plt.figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    left.suptitle("The longest capsule names the digit", fontsize=13)
    axes = left.subplots()
    picture = axes.imshow(answers, cmap="viridis", vmin=0)
    axes.set(xticks=range(10), yticks=range(10), xlabel="capsule of class", ylabel="digit shown")
    left.colorbar(picture, ax=axes, shrink=0.8, label="mean length of the capsule, test images")

    right.suptitle(f"The direction of capsule {shown} says how the {shown} is drawn: it turns as the digit leans", fontsize=13)
    strip, lines, bottom = right.subplots(3, 1, height_ratios=[0.8, 2.4, 1.1])
    picks = [0, 4, 8, 12, 15, 19, 23]
    strip.imshow(torch.cat([slant(images[:1], slants[i].item())[0, 0] for i in picks], dim=1), cmap="gray_r", aspect="auto")
    strip.axis("off")
    for entry in range(4):
        mean, spread = direction[:, :, entry].mean(1), direction[:, :, entry].std(1)
        (line,) = lines.plot(slants, mean, linewidth=2)
        lines.fill_between(slants, mean - spread, mean + spread, alpha=0.15, color=line.get_color(), linewidth=0)
        lines.annotate(
            f"entry {entry + 1}", (slants[-1], mean[-1]), xytext=(6, -3), textcoords="offset points", color=line.get_color()
        )
    lines.set(ylabel="direction u / |u|", ylim=(-1, 1))
    lines.tick_params(labelbottom=False)
    bottom.plot(slants, length.mean(1), color="black", linewidth=2)
    bottom.fill_between(
        slants, length.mean(1) - length.std(1), length.mean(1) + length.std(1), alpha=0.15, color="black", linewidth=0
    )
    bottom.set(xlabel=f"slant of the {shown} (shear)", ylabel="length |u|", ylim=(0, None))
    for axes in (lines, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(-0.66, 0.78)
    lines.set_title(f"mean and deviation over {len(images)} test images", fontsize=9, loc="left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def slant(images, amount):
    """The images sheared sideways around their middle."""
    theta = torch.tensor([[1.0, amount, 0.0], [0.0, 1.0, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images + 0.13 / 0.31, grid, align_corners=False) - 0.13 / 0.31


def main():
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="networks of each kind (default: 1)")
    parser.add_argument("--out", type=Path, help="write the errors there, as records")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images (default: 8)")
    options = parser.parse_args()
    console = Console()
    x, labels = digits("train")
    x_test, labels_test = digits("test")
    begin = time.perf_counter()
    errors: dict[str, list[float]] = {"CNN": [], "SCN": [], "SCN, fused": []}
    steps = {}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console)
    with bar:
        for seed in range(options.seeds):
            models = build(seed)
            for name, model in models.items():
                steps[name] = train(
                    model, x, labels, options.epochs, seed, bar, f"training the {name}" + f", seed {seed}" * (options.seeds > 1)
                )
                errors[name].append(error(model, x_test, labels_test))
            compared = models | {"SCN, fused": subcaps.fuse(models["SCN"])}
            errors["SCN, fused"].append(error(compared["SCN, fused"], x_test, labels_test))
    with torch.no_grad():
        calls = {name: partial(model, x_test) for name, model in compared.items()}
        inference = alternate(calls, torch.device("cpu"), rounds=5, seconds=10)

    table = Table(title="5,000 digits to train on, 1,000 to test on")
    for heading in ("", "error", "parameters", "training, ms per step", "inference, µs per image"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, model in compared.items():
        table.add_row(
            name,
            f"{statistics.mean(errors[name]):.1f}%",
            f"{sum(p.numel() for p in model.parameters()):,}",
            f"{steps[name]:.1f}" if name in steps else "",
            f"{1e3 * inference[name].median / len(x_test):.1f}",
        )
    console.print(table)
    draw(models["SCN"], x_test, labels_test, Path("demo/capsules.png"))
    console.print("What the capsules answer to: demo/capsules.png")
    if options.out:
        command = f"python examples/first.py --seeds {options.seeds} --epochs {options.epochs} --out {options.out}"
        wall_s = time.perf_counter() - begin
        write(options.out, [record(name, values, options.epochs, command, wall_s) for name, values in errors.items()])


def record(name, values, epochs, command, wall_s):
    """The errors of one kind of network."""
    return Record(
        name=f"mnist-subset mnist-cnn {name.lower().replace(',', '')} {epochs} epochs cpu",
        ours=statistics.mean(values),
        std=statistics.stdev(values) if len(values) > 1 else None,
        values=values,
        seeds=range(len(values)),
        unit="error %",
        better="lower",
        bound=3.0,
        wall_s=wall_s,
        **origin(command),
    )


if __name__ == "__main__":
    main()
