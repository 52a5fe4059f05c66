"""Hooks of a run stay outside of the graphs that a pipeline's owner compiled.

``module.compile()`` compiles a module's call with its hooks. A hook that a run adds would be
compiled too, which breaks the graph, and ends in an error where the owner asked for one whole
graph. So for the time of a run the call is plain, the run's hooks are around it, and the graph is
called in place of ``forward``. A graph sees the module, and the children that a run hooks, as the
owner left them: it is not compiled again.

Deeper modules may still have hooks in a graph. They are of no effect there, see `is_in_graph`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

_CALL = "_compiled_call_impl"
_HOOKS = tuple(name for name in vars(nn.Module()) if "forward_" in name and "hooks" in name)


def is_in_graph() -> bool:
    """Whether a hook is being compiled into a graph of the owner: it has to do nothing there.

    The graph stays after the run.
    """
    return torch.compiler.is_compiling()


@contextmanager
def hooks_around_graphs(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context: hooks that are added to these modules, or to their children, run around what was
    compiled of them.
    """
    with ExitStack() as stack:
        for module in {part: None for each in modules for part in (each, *each.children())}:
            if graphs := _graphs_of(module):
                stack.enter_context(_around(module, graphs))
        yield


def _graphs_of(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """What was compiled of a module, by the name of its attribute.

    An `OptimizedModule` compiles another module, and its own hooks are outside.
    """
    own = vars(module)
    if "_orig_mod" in module._modules:
        return {}
    methods = {name: value for name, value in own.items() if _is_graph(value)}
    return methods if own.get(_CALL) is None else {**methods, _CALL: own[_CALL]}


def _is_graph(value: Any) -> bool:
    return callable(value) and hasattr(value, "_torchdynamo_orig_callable")


@contextmanager
def _around(module: nn.Module, graphs: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Context: each graph of the module is called on the module as its owner left it."""
    names = {*_HOOKS, *graphs, "forward"}
    parts = [module, *module.children()]  # those that a run hooks
    owners = [_State(each, names) for each in parts]

    def outside(graph: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(like)
        def call(*args: Any, **kwargs: Any) -> Any:
            ours = [_State(each, names) for each in parts]
            _put_back(owners)
            try:
                return graph(*args, **kwargs)
            finally:
                _put_back(ours)

        return call

    own = vars(module)
    for each in parts:
        vars(each).update({name: OrderedDict(vars(each)[name]) for name in _HOOKS})
    calls = {name: outside(each, each) for name, each in graphs.items() if name != _CALL}
    if _CALL in graphs:  # with the owner's hooks in it
        calls["forward"] = outside(graphs[_CALL], module.forward)
        own.update({name: OrderedDict() for name in _HOOKS})
        own[_CALL] = module._call_impl
    own.update(calls)
    try:
        yield
    finally:
        _put_back(owners)


class _State:
    """What a run changes in a module: its class, hooks and graphs."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self._module, self._class, self._names = module, type(module), names
        self._values = {name: value for name, value in vars(module).items() if name in names}

    def put_back(self) -> None:
        self._module.__class__ = self._class
        own = vars(self._module)
        for name in self._names:
            own.pop(name, None)
        own.update(self._values)


def _put_back(states: Iterable[_State]) -> None:
    for state in states:
        state.put_back()
