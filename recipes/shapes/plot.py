"""Plot the loss curves of all stages: ``python -m recipes.shapes.plot`` (needs matplotlib).

It reads each stage's log.csv and writes ``loss.png`` beside this file.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from recipes.shapes.train import STAGES, WORK

# What is drawn of each stage: (column in training, column in validation, name of its axis).
_CURVES = {
    "autoencoder": ("pixel", "object_64", "PSNR on the object, dB"),
    "temporal": ("pixel", "object_64", "PSNR on the object, dB"),
    "polish": ("pixel_64", "object_64", "PSNR on the object, dB"),
    "text": ("loss", "score", "captions read right"),
    "denoiser": ("loss_128", "all_128", "large clips read right in all four"),
}


def read_log(path: Path, kind: str, column: str) -> tuple[list[float], list[float]]:
    """Minutes of training and the values of one column, of rows of one kind."""
    minutes, values = [], []
    with path.open(newline="") as file:
        for row in csv.reader(file):
            figures = dict(field.split("=") for field in row[3:])
            if row[0] == kind and column in figures:
                minutes.append(float(row[2]) / 60)
                values.append(float(figures[column]))
    return minutes, values


def draw(work: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = [stage for stage in STAGES if (work / stage / "log.csv").exists()]
    if not run:
        raise SystemExit(f"no stage was run in {work}")
    figure, places = pyplot.subplots(
        1, len(run), figsize=(4 * len(run), 3.4), squeeze=False, constrained_layout=True
    )
    for stage, place in zip(run, places[0], strict=True):
        axis: Any = place
        trained, validated, name = _CURVES[stage]
        log = work / stage / "log.csv"
        axis.plot(*read_log(log, "train", trained), color="tab:blue", linewidth=1)
        axis.set(title=stage, xlabel="minutes", yscale="log")
        axis.set_ylabel(f"training loss ({trained})", color="tab:blue")
        other: Any = axis.twinx()
        other.plot(*read_log(log, "valid", validated), "o-", color="tab:orange", markersize=3)
        other.set_ylabel(name, color="tab:orange")
    figure.savefig(target, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the runs")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "loss.png")
    given = parser.parse_args()
    draw(given.work, given.to)
    print(given.to)


if __name__ == "__main__":
    main()
