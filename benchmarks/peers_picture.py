"""The tables of `peers.py` as a picture: how many times as fast as diffusers' float32 each is.

    python benchmarks/peers_picture.py results/peers-svd-2026-11-24.md ANOTHER.md

Reads the pages given, one panel a model, and writes a .png beside the first, under its name. Needs
matplotlib (`pip install -e '.[recipes]'`).
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

#: A line of a table: the candidate, its time, and its ratio, which is bold where it is ours.
_ROW = re.compile(r"^\| (?P<name>[^|]+) \| [\d.e-]+ s \| \**(?P<ratio>[\d.]+)\** \|", re.MULTILINE)

#: Ours, peers, and what all are compared with.
_COLOURS = ("#c2410c", "#64748b", "#cbd5e1")


@dataclass(frozen=True)
class Panel:
    """One model: its title, and candidates with their ratios."""

    title: str
    ratios: dict[str, float]


def read_page(page: Path) -> list[Panel]:
    """The tables of a page. Raises `SystemExit` if it has none."""
    panels = []
    for section in page.read_text().split("\n## ")[1:]:
        found = {row["name"]: float(row["ratio"]) for row in _ROW.finditer(section)}
        if found:
            panels.append(Panel(section.splitlines()[0], found))
    if not panels:
        raise SystemExit(f"{page} has no table of peers")
    return panels


def colour(name: str) -> str:
    ours, peers, base = _COLOURS
    return ours if name.startswith("ours") else base if name == "diffusers float32" else peers


def draw(panels: list[Panel], path: Path) -> None:
    """Bars from the fastest down, a panel below another."""
    sizes = [len(panel.ratios) + 1.5 for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels), figsize=(9, 0.28 * sum(sizes)), squeeze=False,
        gridspec_kw={"height_ratios": sizes}, layout="constrained",
    )  # fmt: skip
    for panel, (axis,) in zip(panels, axes, strict=True):
        bars = sorted(panel.ratios.items(), key=lambda pair: pair[1])
        names, ratios = zip(*bars, strict=True)
        drawn = axis.barh(names, ratios, color=[colour(name) for name in names])
        axis.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
        axis.set_title(panel.title, loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, 1.1 * max(ratios))
    axes[-1, 0].set_xlabel("times as fast as diffusers eager in float32", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", nargs="+", type=Path)
    asked = parser.parse_args()
    path = asked.page[0].with_suffix(".png")
    draw([panel for page in asked.page for panel in read_page(page)], path)
    print(path)


if __name__ == "__main__":
    main()
