"""Match a LoRA's tensors with a model's parameters, and build the patches that merge it.

A tensor without a parameter, or of another shape than its parameter, is an error. It names the
tensor and the model that the file seems to be made for. Modules that a model may lack according to
the file's authors (`key_schemes.MAY_LACK`) lead to a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from torch import Tensor

from everyframe.adapters.factor_shapes import dora_axis, shape_problem
from everyframe.adapters.key_schemes import (
    ANY_DENOISER,
    BOTH,
    EXPERTS,
    MAY_LACK,
    PREFIXES,
    STEM_ALIASES,
    MayLack,
    Prefix,
)
from everyframe.adapters.lora_file import (
    LoraFile,
    ModuleChange,
    check_recorded,
    join_problems,
    read_lora,
)
from everyframe.adapters.model_signatures import identify
from everyframe.adapters.weight_changes import WeightChange
from everyframe.adapters.weight_sites import Shape, Target, WeightSites
from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.patched_file import TensorPatch
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.lora import Lora
from everyframe.runtime.components.patchable import WeightTable


@dataclass(frozen=True)
class WeightPatch:
    """All changes of one parameter, in the order in which the LoRAs were given."""

    changes: tuple[WeightChange, ...]

    def __call__(self, weight: Tensor) -> Tensor:
        """The patched weight, in the dtype of `weight`."""
        return reduce(lambda merged, change: change.apply(merged), self.changes, weight)


@dataclass(frozen=True)
class AppliedLora:
    """A LoRA, matched with a model.

    Attributes:
        lora: the LoRA of the request.
        file: its tensors.
        num_tensors: number of changed parameters by component.
        notes: messages for the user.
    """

    lora: Lora
    file: LoraFile
    num_tensors: Mapping[str, int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchSet:
    """The LoRAs of a request, matched with a model: patches by component and parameter."""

    applied: tuple[AppliedLora, ...] = ()
    patches: Mapping[str, Mapping[str, TensorPatch]] = field(default_factory=dict)


def match_loras(loras: Sequence[Lora], tables: Mapping[str, WeightTable], title: str) -> PatchSet:
    """Read LoRA files and match them with the components of a model; `title` is for messages.

    Reads headers only. A LoRA of strength 0 is read and matched, but patches nothing.

    Raises:
        CheckpointError: a file can't be read or does not fit; the text names the tensors.
        InputError: the model has no such component, or the user must choose a denoiser.
    """
    model = _Model(title, {name: WeightSites(table) for name, table in tables.items()})
    changes: dict[str, dict[str, list[WeightChange]]] = {}
    applied = []
    for lora in loras:
        check_recorded(lora)
        matched = _Match(model, lora, read_lora(lora.path))
        for component, name, change in matched.changes():
            own = changes.setdefault(component, {}).setdefault(name, [])
            if lora.strength:
                own.append(change)
        applied.append(matched.result())
    patches = {
        component: {name: WeightPatch(tuple(each)) for name, each in own.items() if each}
        for component, own in changes.items()
    }
    return PatchSet(tuple(applied), {name: own for name, own in patches.items() if own})


@dataclass(frozen=True)
class _Model:
    title: str
    sites: Mapping[str, WeightSites]

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Denoisers, which a file without component names applies to."""
        return tuple(name for name, each in self.sites.items() if each.table.is_denoiser)

    def chosen(self, lora: Lora) -> tuple[str, ...]:
        """The components that the user chose; empty without a choice."""
        name, experts = lora.component, self.denoisers
        if not name:
            return ()
        if name == BOTH and len(experts) > 1:
            return experts
        if name in EXPERTS and len(experts) > 1:
            return (experts[EXPERTS[name]],)
        if name in self.sites:
            return (name,)
        words = (*EXPERTS, BOTH) if len(experts) > 1 else ()
        raise InputError(
            f"loras: {self.title} has no component {name!r} for {lora.name}; it has "
            f"{', '.join((*self.sites, *words))}"
        )


@dataclass(frozen=True)
class _Place:
    """Place of a file's module in the model: a component, and targets in it."""

    component: str
    targets: tuple[Target, ...]


class _Match:
    """Match of one LoRA with one model; it collects all problems before it raises."""

    def __init__(self, model: _Model, lora: Lora, file: LoraFile) -> None:
        self._model, self._lora, self._file = model, lora, file
        self._chosen = model.chosen(lora)
        self._names_both = self._named_experts() == set(model.denoisers) and (
            len(model.denoisers) > 1
        )
        self._count: dict[str, int] = {}
        self._lacking: dict[MayLack, int] = {}
        if self._names_both and self._chosen:
            raise InputError(
                f"loras: {lora.name} names both denoisers itself; leave out @{lora.component}"
            )

    def result(self) -> AppliedLora:
        """The result, after `changes`."""
        notes = [
            f"{self._lora.name}: {number} modules for {each.description} are left out, which this "
            f"model has not ({each.source})"
            for each, number in self._lacking.items()
        ]
        denoisers = self._model.denoisers
        if len(denoisers) > 1 and not self._chosen and set(self._count) == {denoisers[0]}:
            notes.append(
                f"{self._lora.name} changes {denoisers[0]} alone, which it names; @{BOTH} changes "
                "both denoisers"
            )
        return AppliedLora(self._lora, self._file, self._count, tuple(notes))

    def changes(self) -> Iterator[tuple[str, str, WeightChange]]:
        """Yield (component, parameter, its change) for every parameter that the file changes.

        Raises:
            CheckpointError: a tensor fits no parameter, or has another shape.
            InputError: the file names no component, and the model has two denoisers.
        """
        found = [(module, self._places(module)) for module in self._file.modules]
        unknown = [module for module, places in found if places is None]
        if unknown:
            raise CheckpointError(self._describe_unknown(unknown))
        made: list[tuple[str, str, WeightChange]] = []
        problems = []
        for module, places in found:
            for place in places or ():
                for target in place.targets:
                    own, problem = self._make_changes(module, place.component, target)
                    problems += [problem] if problem else []
                    made += own
        if problems:
            raise CheckpointError(self._message(problems))
        taken: dict[tuple[str, str], str] = {}
        for component, name, change in made:
            other = taken.setdefault((component, name), change.change.stem)
            if other != change.change.stem:
                raise CheckpointError(
                    f"{self._file.path.name}: {other!r} and {change.change.stem!r} are both for "
                    f"{name!r} of {component}"
                )
            self._count[component] = self._count.get(component, 0) + 1
        yield from made

    # ------------------------------------------------------------------------------------- names

    def _places(self, module: ModuleChange) -> tuple[_Place, ...] | None:
        """Places of a file's module in the model; empty if it may be absent, None if it may not."""
        may_lack = None
        for prefixes, name in _readings(module.stem):
            components = self._components(prefixes)
            is_flat = any(prefix.is_flat for prefix in prefixes)
            wanted = _with_modulation(name, is_flat) if module.kind == "diff_m" else name
            places = []
            for component in components:
                sites = self._model.sites[component]
                targets = sites.find(wanted, is_flat=is_flat)
                if targets is not None:
                    places.append(_Place(component, targets))
                may_lack = may_lack or _may_lack(sites, wanted)
            if places and len(places) == len(components):
                self._check_choice(prefixes)
                return tuple(places)
        if may_lack is None:
            return None
        self._lacking[may_lack] = self._lacking.get(may_lack, 0) + 1
        return ()

    def _components(self, prefixes: Sequence[Prefix]) -> tuple[str, ...]:
        """Components that these prefixes mean; empty if the model has no such component."""
        named = [prefix.component for prefix in prefixes if prefix.component]
        denoisers = self._model.denoisers
        name = named[-1] if named else ""
        is_denoiser = not name or name in denoisers or name in ANY_DENOISER
        if is_denoiser and self._chosen and not self._names_both:
            return self._chosen
        if name in self._model.sites:
            return (name,)
        if not name and self._chosen:
            return self._chosen
        return denoisers if not name or name in ANY_DENOISER else ()

    def _check_choice(self, prefixes: Sequence[Prefix]) -> None:
        denoisers = self._model.denoisers
        is_named = any(prefix.component for prefix in prefixes)
        if len(denoisers) > 1 and not is_named and not self._chosen:
            raise InputError(
                f"loras: {self._model.title} has two denoisers and {self._lora.name} names none; "
                f"say which it is for: {self._lora.name}@high, @low or @{BOTH}"
            )

    def _named_experts(self) -> set[str]:
        """Denoisers that prefixes of the file name."""
        named: set[str] = set()
        for module in self._file.modules:
            for prefix in PREFIXES:
                if prefix.component and module.stem.startswith(prefix.text):
                    named.add(prefix.component)
        return named & set(self._model.denoisers)

    # ------------------------------------------------------------------------------------ shapes

    def _make_changes(
        self, module: ModuleChange, component: str, target: Target
    ) -> tuple[list[tuple[str, str, WeightChange]], str]:
        """The changes of one module's weight and bias, or a problem."""
        sites = self._model.sites[component]
        made: list[tuple[str, str, WeightChange]] = []
        where = f"{module.stem!r}"
        if module.kind:
            found = sites.parameter(target.module, "weight")
            if found is None:
                return [], f"{where} changes a weight, and {target.module} has none"
            name, shape = found
            problem = shape_problem(module.kind, module.shapes, _whole(shape, target))
            if problem:
                return [], f"{where} {problem}"
            if _is_norm_of_a_part(module, _whole(shape, target), target):
                return [], (
                    f"{where} has a DoRA magnitude for each input of a layer that this model has "
                    "in parts"
                )
            made.append((component, name, self._change(module, target)))
        if {"diff_b", "up_bias"} & {*module.keys}:
            found = sites.parameter(target.module, "bias")
            if found is None:
                return [], f"{where} changes a bias, and {target.module} has none"
            name, shape = found
            wanted = _whole(shape, target)
            for role in ("diff_b", "up_bias"):
                if module.shapes.get(role, wanted) != wanted:
                    return [], f"{module.keys[role]!r} is {module.shapes[role]}, the bias {wanted}"
            made.append((component, name, self._change(module, target, is_bias=True)))
        return made, ""

    def _change(
        self, module: ModuleChange, target: Target, *, is_bias: bool = False
    ) -> WeightChange:
        return WeightChange(self._file.tensors, module, self._lora.strength, target.rows, is_bias)

    # ------------------------------------------------------------------------------------- words

    def _describe_unknown(self, unknown: list[ModuleChange]) -> str:
        number, total = len(unknown), len(self._file.modules)
        shown = listing([repr(module.stem) for module in unknown])
        if number == total:
            return self._message(
                [f"the model has none of the {total} modules that it changes ({shown})"]
            )
        hint = self._closest(unknown[0])
        return self._message([f"the model lacks {number} of the {total} modules: {shown}{hint}"])

    def _closest(self, module: ModuleChange) -> str:
        *_, (prefixes, name) = _readings(module.stem)
        components = self._components(prefixes)
        close = self._model.sites[components[0]].closest(name) if components else ""
        return f"; closest is {close!r}" if close else ""

    def _message(self, problems: list[str]) -> str:
        looks = identify(self._file)
        made_for = f"; it looks made for {looks}" if looks else ""
        shown = join_problems(problems)
        return f"{self._file.path.name} is no LoRA for {self._model.title}: {shown}{made_for}"


def _readings(stem: str) -> Iterator[tuple[tuple[Prefix, ...], str]]:
    """Ways to read a stem as prefixes and a name, fewest prefixes first."""
    for old, new in STEM_ALIASES:
        stem = stem.replace(old, new)
    waiting: list[tuple[tuple[Prefix, ...], str]] = [((), stem)]
    seen = {stem}
    while waiting:
        prefixes, name = waiting.pop(0)
        yield prefixes, name
        for prefix in PREFIXES:
            rest = name[len(prefix.text) :]
            if name.startswith(prefix.text) and rest and rest not in seen:
                seen.add(rest)
                waiting.append(((*prefixes, prefix), rest))


def _with_modulation(name: str, is_flat: bool) -> str:
    """LightX2V leaves the parameter's name out of its key."""
    return f"{name}{'_' if is_flat else '.'}modulation"


def _may_lack(sites: WeightSites, name: str) -> MayLack | None:
    """The rule that lets the model lack this module; it then has none of the rule's modules."""
    for each in MAY_LACK:
        is_meant = sites.table.class_name == each.class_name and re.fullmatch(each.pattern, name)
        if is_meant and not sites.has_like(each.pattern):
            return each
    return None


def _whole(shape: Shape, target: Target) -> Shape:
    """Shape of the original's tensor."""
    return shape if target.rows is None else (target.rows.total, *shape[1:])


def _is_norm_of_a_part(module: ModuleChange, whole: Shape, target: Target) -> bool:
    shape = module.shapes.get("dora")
    return shape is not None and target.rows is not None and dora_axis(shape, whole) == 1
