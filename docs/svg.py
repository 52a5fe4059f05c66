"""A small SVG writer: shapes and text on a page that is readable in light and in dark.

Colours are classes of one style sheet, which follows the reader's colour scheme. Coordinates are in
pixels from the top left corner. `diagrams.py` draws with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: Class -> (colour in light, colour in dark).
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#656d76", "#9198a1"),
    "line": ("#c4cad2", "#3d444d"),
    "page": ("#ffffff", "#0d1117"),
    "box": ("#f6f8fa", "#161b22"),
    "blue": ("#0969da", "#4493f8"),
    "green": ("#1a7f37", "#3fb950"),
    "orange": ("#bc4c00", "#f0883e"),
    "red": ("#cf222e", "#f85149"),
    "violet": ("#8250df", "#ab7df8"),
    "blue-soft": ("#ddf4ff", "#12304f"),
    "green-soft": ("#dafbe1", "#123821"),
    "orange-soft": ("#fff1e5", "#4a2a10"),
    "red-soft": ("#ffebe9", "#4c1a1d"),
    "violet-soft": ("#fbefff", "#32224f"),
}
FONT = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Drawing:
    """Shapes in the order in which they are drawn; `svg` is the file's text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str = "box",
        stroke: str = "line", radius: float = 6, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Rectangle with rounded corners."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'class="f-{fill} s-{stroke}"{dash}/>'
        )

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        """Filled circle."""
        self._add(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" class="f-{fill}"/>')

    def text(
        self, x: float, y: float, text: str, colour: str = "ink", size: float = 13,
        anchor: str = "start", bold: bool = False, mono: bool = False, turn: int = 0,
    ) -> None:  # fmt: skip
        """One line of text with its baseline at `y`, turned by degrees; `anchor` as in SVG."""
        classes = f"f-{colour}" + " b" * bold + " m" * mono
        turned = f' transform="rotate({turn} {x:g} {y:g})"' if turn else ""
        self._add(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" '
            f'class="{classes}"{turned}>{escape(text, quote=False)}</text>'
        )

    def lines(
        self, x: float, y: float, texts: Sequence[str], colour: str = "soft", size: float = 12,
        anchor: str = "start", step: float = 17, mono: bool = False,
    ) -> None:  # fmt: skip
        """Several lines of text, `step` apart."""
        for number, text in enumerate(texts):
            self.text(x, y + number * step, text, colour, size, anchor, mono=mono)

    def box(
        self, x: float, y: float, width: float, height: float, title: str,
        texts: Sequence[str] = (), tone: str = "",
    ) -> None:  # fmt: skip
        """Box with a title in the middle and lines below it; `tone` is a colour."""
        fill, stroke = (f"{tone}-soft", tone) if tone else ("box", "line")
        self.rect(x, y, width, height, fill, stroke)
        middle = x + width / 2
        top = y + height / 2 + 5 - len(texts) * 8
        self.text(middle, top, title, size=13, anchor="middle", bold=True)
        self.lines(middle, top + 17, texts, size=11.5, anchor="middle", step=15)

    def arrow(self, points: Sequence[tuple[float, float]], colour: str = "soft") -> None:
        """Line through these points with a head at the last one."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        (x0, y0), (x1, y1) = points[-2], points[-1]
        dx, dy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
        left = (x1 - 7 * dx - 4 * dy, y1 - 7 * dy - 4 * dx)
        right = (x1 - 7 * dx + 4 * dy, y1 - 7 * dy + 4 * dx)
        head = f"{x1:g},{y1:g} {left[0]:g},{left[1]:g} {right[0]:g},{right[1]:g}"
        self._add(f'<path d="M{path}" class="n s-{colour}"/>')
        self._add(f'<polygon points="{head}" class="f-{colour}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str = "line") -> None:
        """Thin line."""
        self._add(f'<path d="M{x0:g} {y0:g} L{x1:g} {y1:g}" class="n t s-{colour}"/>')

    def svg(self) -> str:
        """The whole file."""
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{self._style()}</style>",
            f'<rect width="{self.width}" height="{self.height}" rx="8" class="f-page"/>',
            *self._shapes,
            "</svg>\n",
        ])  # fmt: skip

    def _add(self, shape: str) -> None:
        self._shapes.append(shape)

    def _style(self) -> str:
        used = "".join(self._shapes)
        names = [n for n in COLOURS if any(f"{k}-{n}{e}" in used for k in "fs" for e in '" ')]

        def rules(mode: int) -> str:
            return "".join(
                f".f-{name}{{fill:{COLOURS[name][mode]}}}.s-{name}{{stroke:{COLOURS[name][mode]}}}"
                for name in dict.fromkeys(["page", *names])
            )

        return (
            f"text{{font-family:{FONT}}}.m{{font-family:{MONO};white-space:pre}}"
            f".b{{font-weight:600}}.n{{fill:none;stroke-width:1.5}}.t{{stroke-width:.7}}{rules(0)}"
            f"@media (prefers-color-scheme:dark){{{rules(1)}}}"
        )
