"""Notes on fast paths that a component goes without, and on those with a known issue."""

from __future__ import annotations

from collections.abc import Sequence

from everyframe.core.plan import FastPathChoice, Precision
from everyframe.core.quality import PRODUCTS
from everyframe.fast_paths.registry import CATALOGUE, PRECISIONS


def fast_path_notes(
    title: str, choices: Sequence[FastPathChoice], precision: Precision
) -> tuple[str, ...]:
    """Notes on refused and blocked paths with the reason, and on used paths with a known issue."""
    lines = []
    for choice in choices:
        if choice.despite:
            what = precision.compute if choice.path in PRECISIONS else choice.path
            lines.append(f"{title}: {what}, {choice.reason}, in spite of {choice.despite}")
        if choice.path in PRODUCTS and choice.verdict in ("untried", "off"):
            lines.append(f"{title}: without {choice.path}: {choice.reason}")
        if choice.verdict in ("refused", "avoided"):
            verdict = choice.verdict if choice.verdict == "refused" else "is avoided"
            if choice.path in PRECISIONS:
                lines.append(
                    f"{title}: {precision.compute}, as {choice.path} {_was(verdict)} here: "
                    f"{choice.reason}"
                )
            elif choice.verdict == "avoided" or _is_news(choice):
                lines.append(
                    f"{title}: without {choice.path}, which {_was(verdict)} here: {choice.reason}"
                )
    return tuple(lines)


def _is_news(choice: FastPathChoice) -> bool:
    """Whether to report a refusal. "Not faster" is reported only for requested paths."""
    return CATALOGUE[choice.path].on_demand or "no faster" not in choice.reason


def _was(verdict: str) -> str:
    return verdict if verdict.startswith("is ") else f"was {verdict}"
