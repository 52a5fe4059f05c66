"""Block fast paths that a known issue of the target machine affects.

A severe issue about a path (a dtype, a kernel, the compiler) blocks that path. If the issue names
an operation, the path is blocked only for components that use it. An issue that no blocked path
avoids becomes a note with its fix. Issues of packages that our runs do not use are left to
`everyframe doctor`. `choose_fast_paths.py` applies the result; the data is in
`everyframe.hardware.known_issues`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everyframe.core.facts import DeviceFacts, MachineFacts, SoftwareFacts
from everyframe.fast_paths.compilation.toolchain import why_not
from everyframe.fast_paths.registry import for_device
from everyframe.hardware.known_issues import Condition, Issue, find, known_issues
from everyframe.ops.native import library as kernel_library
from everyframe.planning.dry_runs import DryRun

#: Vendors in known issues, by torch device type.
_VENDORS = {"cpu": ("cpu",), "cuda": ("nvidia", "amd"), "mps": ("apple",), "xpu": ("intel",)}

#: Packages that our runs use; issues of other packages don't apply.
_OURS = {"torch", "triton", "diffusers", "transformers", "numpy"}

#: Prefixes of tags that a dry run finds; see `tags_of`.
_OF_COMPONENTS = ("op:conv3d", "component:")


@dataclass(frozen=True)
class BlockReason:
    """Why a path is blocked; it applies to components with the tags `needs`."""

    message: str
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BlockedPaths:
    """Reasons against each path by name; `rest` are issues that no path avoids."""

    paths: Mapping[str, tuple[BlockReason, ...]] = field(default_factory=dict)
    rest: tuple[BlockReason, ...] = ()

    def against(self, path: str, tags: Collection[str]) -> str | None:
        """Why that path is blocked for a component with these tags; None if it is not."""
        found = self.paths.get(path, ())
        return next((each.message for each in found if each.needs <= set(tags)), None)

    def notes(self, runs: Sequence[DryRun]) -> Iterator[str]:
        """Issues that no path avoids, for a plan with these dry runs, one line each."""
        names = {run.stage_call.component for run in runs}
        tags = {tag for name in names for tag in tags_of(name, runs)}
        return (each.message for each in self.rest if each.needs <= tags)

    def and_these(self, paths: Mapping[str, str]) -> BlockedPaths:
        """A copy that blocks these paths too, whatever a component computes."""
        more = {
            name: (BlockReason(message), *self.paths.get(name, ()))
            for name, message in paths.items()
        }
        return replace(self, paths={**self.paths, **more})


def tags_of(component: str, runs: Sequence[DryRun]) -> frozenset[str]:
    """Known-issue tags of a component, from its own dry runs among these."""
    shapes = [
        product.shapes[1]
        for run in runs
        if run.stage_call.component == component
        for product, _ in run.found.work.products
        if product.kind == "convolution"
    ]
    has_conv3d = any(len(shape) == 5 for shape in shapes)
    return frozenset({f"component:{component}", *(["op:conv3d"] if has_conv3d else [])})


def find_blocked(
    machine: MachineFacts, device: DeviceFacts, *, is_here: bool = True
) -> BlockedPaths:
    """Paths blocked on that device of that machine.

    Nothing is looked up if no issue concerns such a device. For a machine that is not this one
    (`is_here` is false) only its own facts count.
    """
    found = _find(machine, device, is_here=is_here)
    if device.kind != "cpu" or not is_here:
        return found
    of_c = kernel_library.why_not()
    missing = {
        "compile": why_not(), **{path.name: of_c for path in for_device(device) if path.needs_c}
    }  # fmt: skip
    return found.and_these({path: reason for path, reason in missing.items() if reason})


def _find(machine: MachineFacts, device: DeviceFacts, *, is_here: bool) -> BlockedPaths:
    vendors = _VENDORS.get(device.kind, ())
    paths = {path.name: frozenset(path.uses) for path in for_device(device)}
    in_question = {
        issue.id
        for issue in known_issues()
        if issue.is_severe and not issue.avoided and issue.decided_by == "facts"
        and _is_ours(issue.where) and _vendors_of(issue.where) & {None, *vendors}
        and (_is_of_components(issue.uses) or any(_affects(issue, uses) for uses in paths.values()))
    }  # fmt: skip
    if not in_question:
        return BlockedPaths()
    machine = _with_software(machine, is_here=is_here)
    issues = [each.issue for each in find(replace(machine, devices=(device,)))]
    matching = [issue for issue in issues if issue.id in in_question]
    return BlockedPaths(
        {
            name: tuple(_against(issue, uses) for issue in matching if _affects(issue, uses))
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
    fix = issue.fix[0]
    way = fix.do if fix.command is None else f"{fix.do}: {fix.command}"
    message = f"known issue {issue.id}: {issue.title} ({way})"
    return BlockReason(message, frozenset(issue.uses) - uses)


def _affects(issue: Issue, uses: frozenset[str]) -> bool:
    """Whether the issue concerns a path with these tags, in some component or in all."""
    return bool(uses & {*issue.uses}) and _is_of_components({*issue.uses} - uses)


def _is_of_components(tags: Iterable[str]) -> bool:
    return all(tag.startswith(_OF_COMPONENTS) for tag in tags)


def _is_ours(where: Condition) -> bool:
    return where.packages.keys() <= _OURS and all(map(_is_ours, where.any))


def _vendors_of(where: Condition) -> set[str | None]:
    if where.vendor is None and where.any:
        return {vendor for each in where.any for vendor in _vendors_of(each)}
    return {where.vendor}
