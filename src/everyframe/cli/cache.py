"""``everyframe cache``: list stored files by kind, and remove one or all of a kind.

`everyframe.engine.stored_files` finds and removes it.
"""

from __future__ import annotations

import sys

from everyframe.cli.options import command, flag, optional, positional, run_flag
from everyframe.cli.table_layout import table
from everyframe.cli.tables import console, json_line, one_line
from everyframe.core.bytes import format_bytes
from everyframe.core.errors import ExitCode, InputError
from everyframe.engine import stored_files
from everyframe.engine.stored_files import StoredEntry

_LIST_HELP = """List what is on this disk: models, runs, calibrations, compiled blocks, kernels.

Give a kind to see each of its entries.
"""
_REMOVE_HELP = """Remove one entry of a kind, or all of it. Without --yes nothing is removed.

A run that a process works on stays. `everyframe cache list` shows kinds and names.
"""


def list_(kind: str | None = None, *, json: bool = False) -> int:
    """Print sizes by kind, or the entries of one kind; the exit code."""
    kinds = stored_files.KINDS if kind is None else (stored_files.find_kind(kind),)
    found = {each: list(stored_files.stored_entries([each])) for each in kinds}
    if json:
        for entries in found.values():
            for entry in entries:
                print(json_line({"type": "stored", **_plain(entry)}))
        return int(ExitCode.DONE)
    out = console(sys.stdout)
    if kind is not None:
        rows = table(("name", "left"), ("size", "right"), ("about", "left"), wraps="name")
        for entry in found[kinds[0]]:
            rows.add_row(one_line(entry.name), format_bytes(entry.num_bytes), entry.about)
        out.print(rows if rows.row_count else f"nothing: no {kinds[0].title} on this disk")
        out.print(f"folder: {one_line(str(kinds[0].folder() or 'off'))}", soft_wrap=True)
        return int(ExitCode.DONE)
    columns = (("kind", "left"), ("entries", "right"), ("size", "right"), ("what", "left"))
    rows = table(*columns, wraps="what")
    for each, entries in found.items():
        size = format_bytes(sum(entry.num_bytes for entry in entries)) if entries else ""
        about = f"{each.title}; once removed: {each.loss}"
        rows.add_row(each.name, str(len(entries) or ""), size, about)
    out.print(rows)
    return int(ExitCode.DONE)


def remove(
    kind: str, name: str | None = None, *, everything: bool = False, yes: bool = False,
    json: bool = False,
) -> int:  # fmt: skip
    """Remove an entry, or all of a kind; the exit code."""
    place = stored_files.find_kind(kind)
    if (name is None) != everything:
        raise InputError(f"give the name of one of the {kind}, or --all for each of them")
    chosen = stored_files.select_entries(place, name)
    what = stored_files.describe_removal(chosen, place) if chosen else ""
    if what and not yes:
        raise InputError(f"nothing was removed; --yes removes {what}")
    for entry in chosen:
        stored_files.remove_entry(entry)
    if json:
        names = [entry.name for entry in chosen]
        print(json_line({"type": "removed", "kind": kind, "names": names,
                         "num_bytes": sum(entry.num_bytes for entry in chosen)}))  # fmt: skip
    else:
        print(one_line(f"removed {what}") if what else f"{kind}: nothing to remove")
    return int(ExitCode.DONE)


def _plain(entry: StoredEntry) -> dict[str, object]:
    return {
        "kind": entry.kind, "name": entry.name, "num_bytes": entry.num_bytes,
        "about": entry.about, "is_busy": entry.is_busy, "path": str(entry.paths[0]),
    }  # fmt: skip


LIST = command(
    list_,
    (optional("kind", "One kind, such as models or runs."), run_flag("json"),
     run_flag("log_level")),
    _LIST_HELP,
)  # fmt: skip
REMOVE = command(
    remove,
    (
        positional("kind", "Its kind, such as models."),
        optional("name", "Its name, as `everyframe cache list KIND` shows it."),
        flag("everything", bool, "Every entry of the kind.", alias="--all"),
        flag("yes", bool, "Remove it."),
        run_flag("json"),
        run_flag("log_level"),
    ),
    _REMOVE_HELP,
)
