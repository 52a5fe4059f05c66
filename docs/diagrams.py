"""Diagrams of the architecture, drawn from the source code where it has the facts.

Each function returns the text of an SVG file; `generate.py` writes them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from svg import Drawing

from everyframe.parallel.token_partition import TokenGrid, TokenPartition

DOCS = Path(__file__).parent
SOURCE = DOCS.parent / "src" / "everyframe"
ARCHITECTURE = DOCS / "explanation" / "architecture.md"

#: The first package of each group, from the top down, and the group's colour.
_GROUPS = {"cli": "blue", "api": "violet", "families": "orange", "runs": "green", "samplers": "red"}
_RANKS = ("blue", "orange", "green")


def packages() -> dict[str, str]:
    """Package -> what it does, from the table of the architecture page, top package first."""
    page = ARCHITECTURE.read_text(encoding="utf-8").split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))


def imports_of(package: str) -> set[str]:
    """Packages that any module of this package imports, also inside functions."""
    path = SOURCE / package
    files = [*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files if path.is_dir() or files[0].exists() else ():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            found |= {n.split(".")[1] for n in names if n.startswith("everyframe.")}
            if isinstance(node, ast.ImportFrom) and node.module == "everyframe":
                found |= {each.name for each in node.names}
    return found - {package}


def packages_and_imports() -> str:
    """The packages from the top down, and a dot in its row for every package that one imports."""
    table = packages()
    names = list(table)
    step, top, left, grid = 26, 168, 24, 590
    right = grid + step * len(names)
    page = Drawing(right + 34, top + step * len(names) + 24, "Packages and their imports")
    page.text(left, 34, "Packages and their imports", size=17, bold=True)
    page.lines(left, 57, [
        "A row has a dot for every package that it imports.",
        "Every dot is on the right of the row's own square: imports go down only.",
        "So every package can be read, tested and changed from the ground up.",
    ], size=12.5)  # fmt: skip
    page.lines(left, 124, ["dashed: planned"], size=11.5)
    middles = [grid + step * (number + 0.5) for number in range(len(names))]
    for number, name in enumerate(names):
        y = top + step * (number + 0.5)
        page.line(middles[number], y, right - 4, y)
        page.line(middles[number], top - 6, middles[number], y)
        page.text(middles[number] + 4, top - 12, name, "soft", 11, mono=True, turn=-55)
    tone = "soft"
    for row, (name, what) in enumerate(table.items()):
        tone = _GROUPS.get(name, tone)
        y = top + row * step
        is_planned = what.endswith("(planned)")
        page.rect(left, y + 2, 150, step - 4, "page" if is_planned else f"{tone}-soft", tone,
                  radius=5, dashed=is_planned)  # fmt: skip
        page.text(left + 75, y + 17, name, size=12, anchor="middle", mono=True)
        page.text(left + 164, y + 17, _shortened(what.removesuffix(" (planned)")), "soft", 11.5)
        page.rect(middles[row] - 8, y + 5, 16, 16, f"{tone}-soft", tone, 3)
        for other in sorted(imports_of(name) & table.keys()):
            page.circle(middles[names.index(other)], y + step / 2, 5.5, tone)
    return page.svg()


def _shortened(text: str, most: int = 66) -> str:
    plain = text.replace("`", "")
    return plain if len(plain) <= most else plain[: most - 1].rsplit(" ", 1)[0] + " …"


def request() -> str:
    """The life of a request, from the options to the file."""
    steps = (
        ("Request", "options,", "validated", "core", "blue"),
        ("spec", "configs are read,", "no weights", "families", "orange"),
        ("facts", "devices, memory,", "versions, issues", "hardware", "red"),
        ("Plan", "frozen, printable,", "dry-run", "planning", "violet"),
        ("stage: encode", "load, text and image,", "free", "engine, runtime", "green"),
        ("stage: denoise", "sampler calls", "denoise(x, t)", "samplers, families", "green"),
        ("stage: decode", "latents to frames,", "in pieces", "families", "green"),
        ("video", "frames and record", "in one file", "media", "red"),
    )
    wide, high, gap, left, top = 176, 92, 42, 24, 84
    page = Drawing(left * 2 + 4 * wide + 3 * gap, 380, "The life of a request")
    page.text(left, 34, "The life of a request", size=17, bold=True)
    page.text(left, 55, "Nothing is downloaded or loaded before the plan is made; from step 5 on, "
              "events report the progress.", "soft", 12)  # fmt: skip
    for number, (title, one, two, package, tone) in enumerate(steps):
        row, column = divmod(number, 4)
        x, y = left + column * (wide + gap), top + row * (high + 64)
        page.box(x, y, wide, high - 16, f"{number + 1}. {title}", (one, two), tone)
        page.text(x + wide / 2, y + high + 1, package, "soft", 11.5, "middle", mono=True)
        if column < 3:
            page.arrow([(x + wide + 4, y + high / 2 - 8), (x + wide + gap - 4, y + high / 2 - 8)])
    turn, end, y = left + 3 * (wide + gap) + wide / 2, left + wide / 2, top + high + 12
    page.arrow([(turn, y), (turn, y + 22), (end, y + 22), (end, y + 48)])
    page.lines(
        left,
        364,
        [
            "Around every step: the guard repairs faults, memory fallbacks apply when "
            "memory runs out, and the run is saved, so it can be resumed."
        ],
    )
    return page.svg()


def guard() -> str:
    """What the guard does with the result of a call."""
    page = Drawing(880, 420, "The guard")
    page.text(24, 34, "The guard", size=17, bold=True)
    page.text(24, 55, "Each result of a component is checked by one reduction. A run without "
              "faults computes what it would compute without the guard.", "soft", 12)  # fmt: skip
    wide, high = 232, 64
    columns, rows = (24, 324, 624), (84, 206, 328)
    page.box(columns[0], rows[0], wide, high, "call a component", ("its inputs stay available",),
             "blue")  # fmt: skip
    page.box(
        columns[1], rows[0], wide, high, "result finite?", ("one min/max reduction",), "violet"
    )
    page.box(columns[2], rows[0], wide, high, "next call", tone="green")
    page.box(columns[1], rows[1], wide, high, "weights and inputs finite?", tone="violet")
    page.box(columns[2], rows[1], wide, high, "error that names the tensor",
             ("nothing is written, exit code 4",), "red")  # fmt: skip
    page.box(columns[1], rows[2], wide, high, "replay the call",
             ("find the first faulty operation,", "compare it with float32"), "orange")  # fmt: skip
    page.box(columns[2], rows[2], wide, high, "error that names the place",
             ("step, module, operation, exit code 4",), "red")  # fmt: skip
    page.box(columns[0], rows[2], wide, high, "repair that module",
             ("fp16 → bf16 → fp32, or plain kernels",), "orange")  # fmt: skip

    def across(row: int, start: int, tone: str, label: str) -> None:
        way = 1 if start < 2 else -1
        y = rows[row] + high / 2
        x0, x1 = columns[start] + wide + 4, columns[start + way] - 4
        page.arrow([(x0, y), (x1, y)], tone)
        page.text((x0 + x1) / 2, y - 8, label, tone, 12, "middle")

    def down(row: int, tone: str, label: str) -> None:
        x = columns[1] + wide / 2
        page.arrow([(x, rows[row] + high + 4), (x, rows[row + 1] - 4)], tone)
        page.text(x + 9, rows[row] + high + 34, label, tone, 12)

    across(0, 0, "soft", "")
    across(0, 1, "green", "yes")
    down(0, "red", "no")
    across(1, 1, "red", "no")
    down(1, "soft", "yes")
    across(2, 1, "red", "no repair")
    page.text(590, rows[2] + high / 2 + 16, "left", "red", 12, "middle")
    y = rows[2] + high / 2
    page.arrow([(columns[1] - 4, y), (columns[0] + wide + 4, y)], "orange")
    x = columns[0] + 60
    page.arrow([(x, rows[2] - 4), (x, rows[0] + high + 4)], "orange")
    page.lines(x + 12, 222, ["call again, same inputs;", "the repair stays for the",
                             "run and is saved"], "orange")  # fmt: skip
    return page.svg()


def tokens() -> str:
    """Columns and rows of tokens of two guidance branches on three ranks."""
    grid = TokenGrid(samples=2, frames=5, places=7)
    split = TokenPartition(grid, (1.0, 1.0, 1.0))
    cell, left, top = 30, 62, 118
    page = Drawing(812, 486, "Tokens on three ranks")
    page.text(24, 34, "One video on three ranks", size=17, bold=True)
    page.text(24, 55, f"Tokens of Open-Sora: {grid.places} places by {grid.frames} frames, for two "
              "branches of guidance. No size divides by three, and nothing is padded.", "soft",
              12)  # fmt: skip
    for side, title in enumerate(
        ("columns: a place in all frames", "rows: a frame with all places")
    ):
        x = left + side * 480
        spans = split.rows if side else split.columns
        page.text(x, top - 22, title, size=13, bold=True)
        for sample in range(grid.samples):
            y = top + sample * (grid.frames * cell + 34)
            page.text(x, y - 5, f"branch {sample + 1}", "soft", 11)
            for frame in range(grid.frames):
                for place in range(grid.places):
                    index = sample * grid.frames + frame if side else sample * grid.places + place
                    rank = next(r for r, span in enumerate(spans) if index in span)
                    tone = _RANKS[rank]
                    at = (x + place * cell, y + frame * cell)
                    page.rect(*at, cell - 3, cell - 3, f"{tone}-soft", tone, 4)
                    page.text(at[0] + 13.5, at[1] + 18, str(rank), tone, 11, "middle")
        shares = " + ".join(str(len(span)) for span in spans)
        whole = sum(map(len, spans))
        noun = "rows" if side else "columns"
        page.text(x, 466, f"{whole} {noun} = {shares}", "soft", 12)
    page.text(40, top + 80, "time", "soft", 11.5, "middle")
    page.arrow([(40, top + 92), (40, top + 140)])
    middle = left + grid.places * cell + (480 - grid.places * cell) / 2
    for y, points, words in (
        (200, [(-90, 0), (90, 0)], ("all-to-all", "before spatial attention")),
        (330, [(90, 0), (-90, 0)], ("all-to-all", "after spatial attention")),
    ):
        page.arrow([(middle + dx, y + dy) for dx, dy in points], "violet")
        page.text(middle, y - 26, words[0], size=12.5, anchor="middle", bold=True)
        page.text(middle, y - 10, words[1], "soft", 11.5, "middle")
    page.lines(
        middle,
        388,
        [
            "temporal and cross-attention,",
            "feed-forward: on columns;",
            "spatial attention: on rows",
        ],
        anchor="middle",
        size=11.5,
    )
    return page.svg()


def memory() -> str:
    """Memory fallbacks in their order."""
    rungs = (
        ("one stage at a time", "each stage is loaded, works for every video, and is freed",
         "always", "soft"),
        ("smaller calls",
         "guidance branches run one after the other; the decoder takes fewer frames",
         "rounding", "green"),
        ("weight sharding", "each device stores some blocks and broadcasts them when needed",
         "exact; several devices", "blue"),
        ("model offload",
         "components of one stage take turns on the device if they don't fit together",
         "exact; slower", "blue"),
        ("block offload", "weights come to the device block by block, from host memory or files",
         "exact; slower", "blue"),
        ("visible savings", "the decoder works in chunks or tiles, overlapping and blended",
         "lossy; as little as needed", "orange"),
        ("8-bit weights", "linear layers are stored in int8; chosen by a plan, never during a run",
         "lossy; about 1 % a layer", "orange"),
    )  # fmt: skip
    step, left, wide = 54, 24, 832
    page = Drawing(left * 2 + wide, 84 + step * len(rungs) + 40, "Memory fallbacks")
    page.text(left, 34, "Memory fallbacks", size=17, bold=True)
    page.text(left, 55, "A plan applies as few as make it fit, the cheapest first. A run that is "
              "out of memory applies the next one and repeats the call.", "soft", 12)  # fmt: skip
    for number, (title, what, price, tone) in enumerate(rungs):
        x, y = left + number * 16, 78 + number * step
        fill = "box" if tone == "soft" else f"{tone}-soft"
        page.rect(x, y, left + wide - x, step - 12, fill, "line" if tone == "soft" else tone)
        page.text(x + 14, y + 26, title, bold=True)
        page.text(268, y + 26, what, size=12)
        page.text(left + wide - 14, y + 26, price, tone, 11.5, "end")
        if number:
            page.arrow([(x - 8, y - 12), (x - 8, y + 21), (x - 2, y + 21)])
    page.text(left, 84 + step * len(rungs) + 20, "If nothing is left, the plan is refused with the "
              "largest size and length that fit.", "soft", 12)  # fmt: skip
    return page.svg()
