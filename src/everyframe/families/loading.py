"""Building one component of a plan: empty on meta, filled strictly, in the plan's precision.

The same few lines for every family, so that every component is loaded in the same way. Peak memory
is the component once, in the precision that it runs in, and `let_go` sees to it that it is gone
when its stage is over. Read next: `checkpoints/strict.py`, `precision/edges.py`.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyframe.checkpoints.strict import KeyMap, check_strictly, load_strictly
from everyframe.checkpoints.tensors import TensorFile, open_checkpoint
from everyframe.core.plan import ComponentPlan
from everyframe.families import offload, quantising, repairing
from everyframe.families.holding import Holding
from everyframe.families.staged import StagedModel
from everyframe.optimize.put_on import after_weights, before_weights
from everyframe.parallel.team import Team
from everyframe.precision import edges, quantised
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.islands import parameter_dtype

_log = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: What was loaded and still lives. Several runs may go on in several threads.
_LOADED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LOCK = threading.Lock()

Look = Callable[[str, nn.Module], object]
"""Shown each component by name as soon as it is loaded, before its first call."""

_LOOKS: ContextVar[tuple[Look, ...]] = ContextVar("looks", default=())


@contextmanager
def shown_to(look: Look) -> Iterator[None]:
    """In the block, `look` is shown every component that is loaded, whatever the family.

    So that hooks can be put on from outside of what loads (traces).
    """
    token = _LOOKS.set((*_LOOKS.get(), look))
    try:
        yield
    finally:
        _LOOKS.reset(token)


def show(component: str, module: nn.Module) -> None:
    """Show a component that was loaded to all who look."""
    for look in _LOOKS.get():
        look(component, module)


def load_component(
    part: ComponentPlan,
    build: Callable[[], ModuleT],
    weights: Path | TensorFile,
    keys: KeyMap,
    outputs: tuple[str, ...] = ("",),
    supply: Team | None = None,
) -> ModuleT:
    """The component's module with those weights, on its device, ready to be called.

    `build` makes it without weights; `outputs` are the submodules whose results leave for the
    engine (see `edges.apply`). `supply` are the ranks that keep the weights between them, if the
    plan has that. Raises `CheckpointError` for anything missing, extra or misshapen.
    """
    module = build_on_meta(build)
    before_weights(module, part.paths)
    persistent = set(module.state_dict())
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
        # Buffers are tables and statistics: they stay as wide as they were made.
        if name not in parameters or name not in persistent:
            return own
        return torch_dtype(parameter_dtype(name, part.precision))

    opened = open_checkpoint(weights)
    where = torch.device(part.device)
    device = torch.device("cpu") if part.offload else where
    rounded = quantised.rows(module, part.precision).keys()
    with quantised.as_quantised(module, part.precision):
        # What comes at each call, from a file or from other ranks, is held against the file here
        # and not read.
        leave = offload.unit_parameters(module) if part.streams else frozenset[str]()
        held = _held(module, part, supply)
        leave = leave if held is None else held.elsewhere
    found = load_strictly(
        module, opened, keys=keys, dtype=dtype_of, device=device, leave=leave | rounded
    )
    quantising.fill(module, part.precision, opened, found.left, (where, device), leave)
    module.eval().requires_grad_(False)
    keep_in_sight(module)
    put_on = edges.apply(module, part.precision, outputs)
    for remedy in part.remedies:
        repairing.put_on(module, remedy)
    if part.offload or held is not None:
        kind = part.precision.weights
        files = quantising.from_files(opened, found.left, where, kind) if part.streams else None
        offload.apply(module, where, held or files)
    after_weights(module, part.paths, outputs, repairing.plain_parts(part.remedies))
    show(part.name, module)
    _log.debug(
        "%s: %d parameters from %s on %s in %s, %d casts at module edges",
        part.name, part.num_parameters, opened.source, part.device, part.precision,
        put_on.num_hooks,
    )  # fmt: skip
    return module


def _held(module: nn.Module, part: ComponentPlan, supply: Team | None) -> Holding | None:
    """What brings weights that ranks keep between them, if the plan has that."""
    if part.holders == 1:
        return None
    assert supply is not None, "planned for ranks"
    return Holding(module, supply, torch.device(part.device))


def check_contents(model: object) -> None:
    """Hold the headers of all of a model's files against its parts, before anything is computed.

    Raises:
        CheckpointError: a tensor missing, extra or misshapen, in whichever part.
    """
    for each in model.contents() if isinstance(model, StagedModel) else ():
        check_strictly(each.empty(), open_checkpoint(each.weights), each.keys)


def keep_in_sight(module: nn.Module) -> None:
    """Have `let_go` see that this module, which was loaded just now, is gone in time.

    Each of its parts, too: one may be part of a cycle and stay when the whole is gone.
    """
    with _LOCK:
        _LOADED.update(module.modules())


@contextmanager
def let_go() -> Iterator[None]:
    """What is loaded within lives no longer than whoever loaded it.

    A module goes with the last one who holds it, so there is nothing to do as a rule. Where it is
    part of a cycle only the collector helps, which looks at everything in the process: 0.2 s with
    torch and diffusers in it, so it is asked only then.
    """
    with _LOCK:
        before = weakref.WeakSet(_LOADED)
    yield
    with _LOCK:
        is_held = any(module not in before for module in _LOADED)
    if is_held:
        gc.collect()


def build_on_meta(build: Callable[[], ModuleT]) -> ModuleT:
    """The module with sizes and no numbers; nothing is allocated."""
    with torch.device("meta"), _NothingToDraw():
        return build()


class _NothingToDraw(TorchFunctionMode):
    """First weights are not drawn where there are no numbers, which takes half of the building."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_"):
            tensor: Tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def count_parameters(build: Callable[[], nn.Module]) -> dict[str, int]:
    """Elements of each parameter and persistent buffer by name; nothing is allocated.

    What one parameter has several names for (T5's embedding) is counted once.
    """
    return count_elements(build_on_meta(build))


def count_elements(module: nn.Module) -> dict[str, int]:
    """The same of a module that is there."""
    once: dict[int, tuple[str, int]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        once.setdefault(id(tensor), (name, tensor.numel()))
    return dict(once.values())
