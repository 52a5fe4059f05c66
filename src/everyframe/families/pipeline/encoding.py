"""Of several ranks that make one video the first encodes texts and pictures for all.

Every rank makes the pipeline's own call, so encoders are called there too, in the same order and
with the same input; on the others what answers is the first rank's encoder. Theirs have no weights.
Their `__call__` is another one meanwhile, as in `replaying.py`: a hook can't keep a module from
being computed. What a pipeline encodes by another way than a call (an autoencoder's `encode`) each
rank does by itself.
Read next: `stages.py`, `loading.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everyframe.core.errors import CannotRunError
from everyframe.families.loading import build_on_meta
from everyframe.families.pipeline.checkpoint import Part
from everyframe.families.pipeline.classes import empty_component
from everyframe.parallel.team import Team

_WHAT = "what is encoded is handed on"

_NAMES = ("text_encoder", "image_encoder")


def encoders(names: Any) -> tuple[str, ...]:
    """Those of the components that encode texts and pictures, by calls of the whole module."""
    return tuple(name for name in names if name.startswith(_NAMES))


def without_weights(part: Part, dtype: torch.dtype) -> nn.Module:
    """An encoder that another rank computes: its config and its dtype, which pipelines ask for."""
    module: nn.Module = build_on_meta(partial(empty_component, part))
    return module.to(dtype).eval()


class EncodedOnce:
    """While it is entered, calls of these modules are answered by the first rank of `team`.

    All ranks must make the same calls in the same order; answers arrive on `device`, bit for bit.
    """

    def __init__(self, modules: Mapping[str, nn.Module], team: Team, device: str) -> None:
        self._modules, self._team, self._device = dict(modules), team, device
        self._classes: dict[str, type[nn.Module]] = {}

    def __enter__(self) -> EncodedOnce:
        for name, module in self._modules.items():
            self._classes[name] = type(module)
            module.__class__ = self._kind(type(module))
        return self

    def __exit__(self, *_: object) -> None:
        for name, kind in self._classes.items():
            self._modules[name].__class__ = kind
        self._classes.clear()

    def _kind(self, base: type[nn.Module]) -> type[nn.Module]:
        """That class, whose calls the first rank answers."""

        def call(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._team.is_lead:
                return self._hand_on(base.__call__(own, *args, **kwargs))
            return self._handed_on()

        return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})

    def _hand_on(self, answer: Any) -> Any:
        leaves, form = pytree.tree_flatten(answer, is_leaf=_is_leaf)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = [None if isinstance(leaf, Tensor) else [_plain(leaf)] for leaf in leaves]
        is_here = [tensor.device.type != "cpu" for tensor in tensors]
        self._team.tell([pytree.treespec_dumps(form), plain, is_here], 0, _WHAT)
        self._team.share(tensors, 0, _WHAT)
        return answer

    def _handed_on(self) -> Any:
        form, plain, is_here = self._team.tell(None, 0, _WHAT)
        came = self._team.share(None, 0, _WHAT)
        placed = [
            tensor.to(self._device) if here else tensor
            for tensor, here in zip(came, is_here, strict=True)
        ]
        tensors = iter(placed)
        leaves = [next(tensors) if each is None else each[0] for each in plain]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(form))


def _is_leaf(value: Any) -> bool:
    """Containers and outputs of transformers are taken apart, and nothing else."""
    return not isinstance(value, (dict, list, tuple))


def _plain(value: Any) -> Any:
    """What is no tensor; a language model's memory of earlier words is left out."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value).__name__.endswith("Cache"):
        return None
    raise CannotRunError(
        f"an encoder answers with a {type(value).__name__}, which can't be handed on to other "
        "devices; give one device"
    )
