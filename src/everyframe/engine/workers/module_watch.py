"""Watch over module calls in a worker: each goes to its flight recorder."""

from __future__ import annotations

import warnings
from typing import Any

from everyframe.checkpoints.read_progress import watch_reads
from everyframe.engine.workers.flight_recorder import FlightRecorder
from everyframe.precision.dtypes import dtype_name


class ModuleWatch:
    """Record each module call in the flight recorder, by a global module hook.

    Modules are identified by memory address and not referenced; a reference would keep weights
    alive. Of a compiled block the call as a whole is recorded.
    """

    #: Compiled blocks are used beside a hook that says so; see
    #: `fast_paths.compilation.block_state.only_watches`.
    only_watches = True

    def __init__(self, recorder: FlightRecorder) -> None:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._recorder = recorder
        watch_reads(lambda begins: self._recorder.read(begins))
        self._tensor = torch.Tensor
        self._is_compiling = torch.compiler.is_compiling
        self._components: list[str] = []
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[Any, int] = {}
        register_module_forward_pre_hook(self._before)
        # The hook is ours, and does nothing while a module is compiled.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        # diffusers calls it so, and the plan accounts for the cost.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")

    def write_to(self, recorder: FlightRecorder) -> None:
        """Write to that flight recorder from now on; it knows no names yet."""
        self._recorder = recorder
        self._dtypes.clear()
        self.begin()

    def begin(self) -> None:
        """Forget all modules at a new stage; others may take their addresses."""
        self._components.clear()
        self._numbers.clear()

    def add(self, component: str) -> None:
        """Register a component of this stage."""
        self._components.append(component)
        self._numbers.clear()

    def _before(self, module: Any, given: tuple[Any, ...]) -> None:
        if self._is_compiling():
            return
        number = self._numbers.get(id(module)) or self._learn(module)
        if given and isinstance(given[0], self._tensor):
            first = given[0]
            dtype = self._dtypes.get(first.dtype)
            if dtype is None:
                dtype = self._recorder.learn(dtype_name(first.dtype))
                self._dtypes[first.dtype] = dtype
            self._recorder.enter(number, dtype, first.shape)
        else:
            self._recorder.enter(number, 0, ())

    def _learn(self, module: Any) -> int:
        """Number the module and its submodules; the first module called is the outermost."""
        alone = self._components[0] if len(self._components) == 1 else type(module).__name__
        for name, part in module.named_modules():
            place = ".".join(each for each in (alone, name) if each)
            name = f"{place} ({type(part).__name__})"
            self._numbers[id(part)] = self._recorder.learn(name)
        return self._numbers[id(module)]
