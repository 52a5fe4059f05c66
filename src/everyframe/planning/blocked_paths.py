"""Known issues of the machine that a plan is for: fast paths that they stand against, and the rest.

A severe issue about a path (a dtype, a kernel, the compiler) has that path avoided, only where a
component does what the issue is about if it names an operation. One that no path avoids is told,
with what mends it. Issues of other systems' packages are the doctor's alone. Read next:
`choose_fast_paths.py`, which asks; `everyframe.hardware.known_issues`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.fast_paths.registry import for_device
from everyframe.fast_paths.toolchain import why_not
from everyframe.hardware.known_issues import Condition, Issue, find, known_issues
from everyframe.planning.dry_runs import DryRun

#: Vendors of known issues by torch's device types.
_VENDORS = {"cpu": ("cpu",), "cuda": ("nvidia", "amd"), "mps": ("apple",), "xpu": ("intel",)}

#: What our runs are made of; an issue of another package is no issue of theirs.
_OURS = {"torch", "triton", "diffusers", "transformers", "numpy"}

#: Tags that a dry run tells of a component; see `tags_of`.
_OF_COMPONENTS = ("op:conv3d", "component:")


@dataclass(frozen=True)
class BlockReason:
    """What stands against a path, in words; `needs` are tags that a component must have for it."""

    says: str
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BlockedPaths:
    """What stands against each path by its name, and what no path avoids."""

    paths: Mapping[str, tuple[BlockReason, ...]] = field(default_factory=dict)
    rest: tuple[BlockReason, ...] = ()

    def against(self, path: str, tags: Collection[str]) -> str | None:
        """Why that path is avoided for a component with these tags; None if it is not."""
        found = self.paths.get(path, ())
        return next((each.says for each in found if each.needs <= set(tags)), None)

    def notes(self, runs: Sequence[DryRun]) -> Iterator[str]:
        """What no path avoids, of a plan with these dry runs, a line each."""
        names = {run.rehearsal.component for run in runs}
        tags = {tag for name in names for tag in tags_of(name, runs)}
        return (each.says for each in self.rest if each.needs <= tags)

    def and_these(self, paths: Mapping[str, str]) -> BlockedPaths:
        """The same, with more that stands against paths, whatever a component does."""
        more = {
            name: (BlockReason(says), *self.paths.get(name, ())) for name, says in paths.items()
        }
        return replace(self, paths={**self.paths, **more})


def tags_of(component: str, runs: Sequence[DryRun]) -> frozenset[str]:
    """Tags of known issues for a component, by its own of these dry runs."""
    shapes = [
        product.shapes[1]
        for run in runs
        if run.rehearsal.component == component
        for product, _ in run.found.work.products
        if product.kind == "convolution"
    ]
    has_conv3d = any(len(shape) == 5 for shape in shapes)
    return frozenset({f"component:{component}", *(["op:conv3d"] if has_conv3d else [])})


def known(machine: MachineFacts, device: DeviceFacts, *, is_here: bool = True) -> BlockedPaths:
    """What is known of that device in that machine.

    Nothing is looked up where no issue is about such a device. Of a machine that is not here
    (`is_here`) only its own facts count.
    """
    missing = why_not() if device.kind == "cpu" and is_here else None
    found = _known(machine, device, is_here=is_here)
    return found.and_these({"compile": missing}) if missing else found


def _known(machine: MachineFacts, device: DeviceFacts, *, is_here: bool) -> BlockedPaths:
    vendors = _VENDORS.get(device.kind, ())
    paths = {path.name: frozenset(path.uses) for path in for_device(device)}
    in_question = {
        issue.id
        for issue in known_issues()
        if issue.is_severe and not issue.avoided and issue.decided_by == "facts"
        and _is_ours(issue.where) and _vendors_of(issue.where) & {None, *vendors}
        and (_is_of_components(issue.uses) or any(_about(issue, uses) for uses in paths.values()))
    }  # fmt: skip
    if not in_question:
        return BlockedPaths()
    machine = _with_software(machine, is_here=is_here)
    issues = [each.issue for each in find(replace(machine, devices=(device,)))]
    matching = [issue for issue in issues if issue.id in in_question]
    return BlockedPaths(
        {
            name: tuple(_against(issue, uses) for issue in matching if _about(issue, uses))
            for name, uses in paths.items()
        },
        tuple(
            _against(issue)
            for issue in matching
            if _is_of_components(issue.uses) and issue.certainty != "low"
        ),
    )


def _with_software(machine: MachineFacts, *, is_here: bool) -> MachineFacts:
    if machine.software is not None:
        return machine
    if not is_here:
        return replace(machine, software=SoftwareFacts(system="linux"))
    from everyframe.hardware.software import software_facts, with_loaded

    return replace(machine, software=with_loaded(software_facts()))


def _against(issue: Issue, uses: frozenset[str] = frozenset()) -> BlockReason:
    mend = issue.mend[0]
    way = mend.do if mend.command is None else f"{mend.do}: {mend.command}"
    says = f"known issue {issue.id}: {issue.title} ({way})"
    return BlockReason(says, frozenset(issue.uses) - uses)


def _about(issue: Issue, uses: frozenset[str]) -> bool:
    """Whether it is about a path with these tags, in a component or in all."""
    return bool(uses & {*issue.uses}) and _is_of_components({*issue.uses} - uses)


def _is_of_components(tags: Iterable[str]) -> bool:
    return all(tag.startswith(_OF_COMPONENTS) for tag in tags)


def _is_ours(where: Condition) -> bool:
    return where.packages.keys() <= _OURS and all(map(_is_ours, where.any))


def _vendors_of(where: Condition) -> set[str | None]:
    if where.vendor is None and where.any:
        return {vendor for each in where.any for vendor in _vendors_of(each)}
    return {where.vendor}
