"""Change the class of a module that is built already."""

from __future__ import annotations

from torch import nn


def recast(module: nn.Module, name: str, kind: type[nn.Module]) -> nn.Module:
    """Replace a submodule by one of another class with the same parameters, hooks and values."""
    where, _, last = name.rpartition(".")
    made = object.__new__(kind)
    vars(made).update(vars(module.get_submodule(name)))
    setattr(module.get_submodule(where), last, made)
    return made
