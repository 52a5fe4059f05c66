"""Strict loading: a missing, extra or misshapen tensor is an error.

All names, shapes and kinds are compared from headers first; then each tensor is read straight into
its place. For a module built under ``torch.device("meta")`` the peak memory is one module plus one
tensor. Renames, ignored names and tied weights are data (`KeyMap`).

A module that computes its buffers (non-persistent: frequencies, tables) and is built on meta must
have a method ``reset_buffers()`` that computes them again on the default device; it is called
after loading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.errors import CheckpointError, did_you_mean

DtypeRule = Callable[[str, torch.dtype], torch.dtype]
"""(name in the module, dtype in the module) -> wanted dtype; asked for floating tensors only."""


def load_strictly(
    module: nn.Module,
    checkpoint: TensorFile,
    *,
    keys: KeyMap | None = None,
    dtype: torch.dtype | DtypeRule | None = None,
    device: str | torch.device = "cpu",
    leave: Collection[str] = (),
) -> dict[str, str]:
    """Fill every parameter and persistent buffer of `module` from `checkpoint`.

    Args:
        module: on the meta device (then nothing is allocated twice) or on a real one.
        checkpoint: from `open_checkpoint`.
        keys: renames, ignored names, tied weights.
        dtype: of floating tensors in the module: one for all, or a rule per name; None leaves the
            module's own. Integer and boolean tensors always have the module's dtype.
        device: where the tensors go.
        leave: names in the module that are compared like all others but not read: they are meta
            tensors of their dtype, to be read later.

    Returns:
        Name in the files by name in the module, of the tensors that were left unread.

    Raises:
        CheckpointError: a tensor is missing, extra, misshapen or of another kind, or two have one
            place; names the first few and counts them. The module is then unchanged, unless tied
            tensors turn out to differ.
        AssertionError: a buffer is left on meta (see this module's docstring).
    """
    keys = keys or KeyMap()
    slots = _slots(module)
    groups = _groups(slots, keys.tied)
    sources = _compare(checkpoint, keys, slots, groups)

    filled: set[int] = set()
    left: dict[str, str] = {}
    with torch.no_grad():
        for target, source in sources.items():
            group = groups[target]
            if id(group) in filled:
                _check_equal(checkpoint, source, slots[group[0]].tensor, left.get(group[0]))
                continue
            wanted = _wanted_dtype(target, slots[target].tensor, dtype)
            if target in leave:
                tensor = torch.empty(checkpoint.shape(source), dtype=wanted, device="meta")
                left |= dict.fromkeys(group, source)
            else:
                tensor = checkpoint.load(source, device, wanted)
            _place(tensor, [slots[name] for name in group])
            filled.add(id(group))
    _reset_buffers(module, torch.device(device))
    return left


def check_strictly(module: nn.Module, checkpoint: TensorFile, keys: KeyMap | None = None) -> None:
    """Raise the errors of `load_strictly` for names, shapes and kinds; reads headers only.

    Raises:
        CheckpointError: as in `load_strictly`.
    """
    keys, slots = keys or KeyMap(), _slots(module)
    _compare(checkpoint, keys, slots, _groups(slots, keys.tied))


def _compare(
    checkpoint: TensorFile,
    keys: KeyMap,
    slots: Mapping[str, _Slot],
    groups: Mapping[str, list[str]],
) -> dict[str, str]:
    """Result of `_map_names`; raises `CheckpointError` on any mismatch."""
    sources = _map_names(checkpoint, keys)
    _compare_names(checkpoint, sources, slots, groups)
    _compare_facts(checkpoint, sources, slots)
    return sources


@dataclass
class _Slot:
    """Place of a tensor in the module: the owner's table and the key in it."""

    table: dict[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.table[self.key]
        assert tensor is not None
        return tensor


def _slots(module: nn.Module) -> dict[str, _Slot]:
    """Name -> place of each tensor that a checkpoint must hold; tied ones under each name."""
    slots: dict[str, _Slot] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        tables: tuple[Mapping[str, torch.Tensor | None], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is None or key in owner._non_persistent_buffers_set:
                    continue
                assert isinstance(table, dict)
                slots[dot + key] = _Slot(table, key)
    return slots


def _groups(slots: Mapping[str, _Slot], tied: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Name -> all names of the same parameter, itself included; its members share one list.

    Tied by the module itself (one object under several names) or by `tied`.
    """
    groups: dict[str, list[str]] = {}
    by_object: dict[int, list[str]] = {}
    for name, slot in slots.items():
        group = by_object.setdefault(id(slot.tensor), [])
        group.append(name)
        groups[name] = group
    for names in tied:
        present = [name for name in names if name in groups]
        merged: list[str] = []
        for name in present:
            merged += [each for each in groups[name] if each not in merged]
        for name in merged:
            groups[name] = merged
    return groups


def _map_names(checkpoint: TensorFile, keys: KeyMap) -> dict[str, str]:
    """Module name -> checkpoint name in file order, without ignored names."""
    sources: dict[str, str] = {}
    for name in checkpoint:
        target = keys.target(name)
        if target is None:
            continue
        if target in sources:
            raise CheckpointError(
                f"{checkpoint.source}: {sources[target]!r} and {name!r} are both for {target!r}"
            )
        sources[target] = name
    return sources


def _compare_names(
    checkpoint: TensorFile,
    sources: Mapping[str, str],
    slots: Mapping[str, _Slot],
    groups: Mapping[str, list[str]],
) -> None:
    extra = [source for target, source in sources.items() if target not in slots]
    missing = [
        name
        for name in slots
        if groups[name][0] == name and not any(each in sources for each in groups[name])
    ]
    problems = []
    if missing:
        hint = did_you_mean(missing[0], extra) if extra else ""
        problems.append(f"lacks {_count(missing)}: {_quote_names(missing)}{hint}")
    if extra:
        hint = "" if missing else did_you_mean(extra[0], slots)
        problems.append(f"has {_count(extra)} too many: {_quote_names(extra)}{hint}")
    if problems:
        raise CheckpointError(f"{checkpoint.source} {', and '.join(problems)}")


def _compare_facts(
    checkpoint: TensorFile, sources: Mapping[str, str], slots: Mapping[str, _Slot]
) -> None:
    problems = []
    for target, source in sources.items():
        place = slots[target].tensor
        shape, kind = checkpoint.shape(source), checkpoint.dtype(source)
        if shape != tuple(place.shape):
            problems.append(f"{source!r} has shape {shape}, expected {tuple(place.shape)}")
        elif kind.is_floating_point != place.dtype.is_floating_point:
            problems.append(f"{source!r} has dtype {kind}, expected {place.dtype}")
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise CheckpointError(f"{checkpoint.source}: {'; '.join(problems[:4])}{more}")


def _wanted_dtype(
    name: str, place: torch.Tensor, dtype: torch.dtype | DtypeRule | None
) -> torch.dtype:
    if dtype is None or not place.dtype.is_floating_point:
        return place.dtype
    if isinstance(dtype, torch.dtype):
        return dtype
    return dtype(name, place.dtype)


def _place(tensor: torch.Tensor, slots: Iterable[_Slot]) -> None:
    """Put `tensor` into every slot of one group; a tied parameter stays one object."""
    replacement: torch.Tensor | None = None
    for slot in slots:
        old = slot.tensor
        if replacement is None:
            if isinstance(old, nn.Parameter):
                replacement = nn.Parameter(tensor, requires_grad=old.requires_grad)
            else:
                replacement = tensor
        slot.table[slot.key] = replacement


def _check_equal(
    checkpoint: TensorFile, source: str, filled: torch.Tensor, left: str | None
) -> None:
    """Check a tensor against the one that it is tied to, in the module or `left` in the file."""
    first = filled if left is None else checkpoint.load(left, "cpu", filled.dtype)
    if not torch.equal(checkpoint.load(source, first.device, first.dtype), first):
        raise CheckpointError(
            f"{checkpoint.source}: {source!r} should equal the weights that it is tied to, "
            "but differs"
        )


def _reset_buffers(module: nn.Module, device: torch.device) -> None:
    """Recompute buffers on meta, and check that none is left there."""
    for owner in module.modules():
        on_meta = any(b is not None and b.is_meta for b in owner._buffers.values())
        reset = getattr(owner, "reset_buffers", None)
        if on_meta and callable(reset):
            with torch.device(device):
                reset()
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    assert not left, (
        f"{_count(left)} left on the meta device: {_quote_names(left)}; give the module that owns "
        "them a method reset_buffers() that computes them"
    )
    # Buffers of a module that was built on a real device follow its parameters.
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device and device.type != "meta":
                owner._buffers[key] = buffer.to(device)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}"


def _quote_names(names: Sequence[str]) -> str:
    return listing([repr(name) for name in names])
