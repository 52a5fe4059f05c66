"""Components and encoded prompts that stay in memory from one run to the next.

A `ComponentCache` is shared by runs, also of several threads and models. Each run has
`CachedComponents` of its own, which lends components from it: one run at a time has a component, or
the runs of one batch (`batch_member.py`). After its stage a component goes back only if it is as it
was right after loading, bit for bit (`component_state.py`). The least recently used go first when
the next stage needs their memory.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from everyframe.core.bytes import USABLE_SHARE
from everyframe.core.events import Event, Repaired
from everyframe.core.facts import MachineFacts
from everyframe.core.plan import ComponentPlan, Plan
from everyframe.hardware.memory import OutOfMemory, catch_out_of_memory, empty_cache
from everyframe.precision.cast_hooks import tensors_in
from everyframe.runtime.batch_member import MEMBER
from everyframe.runtime.components.component_observers import is_component_awaited
from everyframe.runtime.components.component_state import ComponentState
from everyframe.runtime.components.input_digest import digest_of

_log = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=nn.Module)

_Key = tuple[Hashable, Hashable]
"""What a component is made of, without and with its LoRAs."""

#: Bytes of encoded prompts that stay.
_MOST_ENCODED = 64 * 2**20


Rewrite = Callable[[nn.Module, Collection[str]], bool]
"""Reads these parameters of a module again, with the patches of now; False if it can't."""


@dataclass
class _Entry:
    """A component that waits for its next run; LoRAs are merged into the `patched` parameters.

    `num_runs` of a batch have it; `is_changed` if one of them left it in an unknown state.
    """

    model: str
    device: str
    module: nn.Module
    state: ComponentState
    loras: Hashable
    patched: frozenset[str]
    since: float = field(default_factory=time.time)
    num_runs: int = 0
    is_changed: bool = False


class ComponentCache:
    """Loaded components by what they were made of, and encoded prompts; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Key, _Entry] = OrderedDict()
        self._shared: dict[_Key, _Entry] = {}
        self._encoded: OrderedDict[Hashable, Any] = OrderedDict()
        self._checked: set[Hashable] = set()

    def is_checked(self, files: Hashable) -> bool:
        """Whether the headers of these files were found to fit their model."""
        return files in self._checked

    def note_checked(self, files: Hashable) -> None:
        """Note that the headers of these files fit their model."""
        with self._lock:
            self._checked.add(files)

    def num_bytes(self) -> Mapping[str, int]:
        """Bytes of all that stays, by device."""
        with self._lock:
            sizes: Counter[str] = Counter()
            for entry in self._waiting.values():
                sizes[entry.device] += entry.state.num_bytes
            for results in self._encoded.values():
                for each in tensors_in(results):
                    sizes[str(each.device)] += each.nbytes
        return sizes

    def freed(self, facts: MachineFacts) -> MachineFacts:
        """The facts of this machine once nothing stays: a run can have all of its memory."""
        return facts.with_freed(self.num_bytes())

    def models(self) -> Iterator[tuple[str, int, float, str]]:
        """Model, bytes, time of the last use and device of each component that waits."""
        with self._lock:
            found = [*self._waiting.values()]
        for each in found:
            yield each.model, each.state.num_bytes, each.since, each.device

    def clear(self) -> None:
        """Free everything."""
        with self._lock:
            self._waiting.clear()
            self._encoded.clear()
        _collect()

    def take(self, key: _Key) -> _Entry | None:
        """Take a component out; None if it is not there. One with other LoRAs does as well."""
        with self._lock:
            others = [other for other in self._waiting if other[0] == key[0]]
            if not others:
                return None
            return self._waiting.pop(key if key in others else others[-1])

    def shared(self, key: _Key) -> _Entry | None:
        """The component that other runs of this batch have; None if there is none."""
        return self._shared.get(key)

    def share(self, key: _Key, entry: _Entry) -> None:
        """Note that one more run of the batch has the component."""
        with self._lock:
            entry.num_runs += 1
            self._shared[key] = entry

    def release(self, key: _Key, entry: _Entry, *, is_intact: bool) -> bool:
        """Note that a run is done with a component; whether it may be put back now."""
        with self._lock:
            if self._shared.get(key) is entry:
                entry.num_runs -= 1
                entry.is_changed |= not is_intact
                if entry.num_runs:
                    return False
                del self._shared[key]
                return not entry.is_changed
            return is_intact

    def lent_bytes(self, device: str, own: Iterable[_Entry]) -> int:
        """Bytes of these components, and of those that other runs of the batch have."""
        with self._lock:
            entries = {id(each): each for each in (*own, *self._shared.values())}
        return sum(e.state.num_bytes for e in entries.values() if e.device == device)

    def put(self, key: _Key, entry: _Entry) -> None:
        """Put a component back, as the most recently used one."""
        with self._lock:
            entry.since = time.time()
            self._waiting[key] = entry

    def make_room(self, device: str, num_bytes: int) -> bool:
        """Free components on a device until at most `num_bytes` are left; whether any was freed."""
        freed = False
        while True:
            with self._lock:
                here = {k: e for k, e in self._waiting.items() if e.device == device}
                if sum(each.state.num_bytes for each in here.values()) <= num_bytes:
                    break
                oldest = next(iter(here))
                model = self._waiting.pop(oldest).model
            freed = True
            _log.info("a component of %s on %s is freed for the next one", model, device)
            del here
        if freed:
            _collect()
        return freed

    def find_encoded(self, key: Hashable) -> Any:
        """Stored results of an encoder, read-only; None if there are none."""
        with self._lock:
            found = self._encoded.get(key)
            if found is not None:
                self._encoded.move_to_end(key)
            return found

    def keep_encoded(self, key: Hashable, results: Any) -> None:
        """Keep what was encoded, as long as there is room."""
        with self._lock:
            self._encoded[key] = results
            while sum(map(_num_bytes, self._encoded.values())) > _MOST_ENCODED:
                self._encoded.popitem(last=False)


class WarmComponents:
    """The components of one run, which are loaded for it alone: nothing stays.

    `CachedComponents` takes them from a cache and gives them back.
    """

    def component(
        self,
        name: str,
        load: Callable[[], _Module],
        rewrite: Rewrite,
        patched: Collection[str] = (),
    ) -> _Module:
        """A component in the plan's precision on its device, from the cache or loaded now.

        `patched` are its parameters that LoRAs change. One from the cache that has other LoRAs gets
        the parameters that either changes from its files by `rewrite`.
        """
        return load()

    def free_others(self) -> bool:
        """Free what other runs left, after running out of memory; whether there was anything."""
        return False

    def during_stage(self) -> AbstractContextManager[None]:
        """Context: a stage; what was lent to it returns at its end, or when it is interrupted."""
        return nullcontext()

    def note(self, event: Event) -> None:
        """Note a repair or memory fallback: what it changed is dropped."""

    def find_encoded(self, component: str, stage: object, inputs: object) -> tuple[Hashable, Any]:
        """Key of these inputs of a stage, and what it made of them before; None if nothing."""
        return None, None

    def keep_encoded(self, key: Hashable, component: str, results: Any) -> None:
        """Keep what a stage made, once it ends well."""


@dataclass
class CachedComponents(WarmComponents):
    """What one run lends from a cache.

    Attributes:
        plan: the plan of the run.
        identity: what the weights are: digests of the model and of single components.
        loras: the LoRAs that are merged into them.
    """

    cache: ComponentCache
    plan: Plan
    identity: Hashable
    loras: Hashable
    _lent: dict[str, tuple[_Key, _Entry]] = field(default_factory=dict)
    _pending: dict[Hashable, tuple[str, Any]] = field(default_factory=dict)

    def component(
        self,
        name: str,
        load: Callable[[], _Module],
        rewrite: Rewrite,
        patched: Collection[str] = (),
    ) -> _Module:
        """See `WarmComponents`."""
        key = self._key(name)
        if key is None or is_component_awaited():
            return load()
        part = self.plan.component(name)
        is_batch = MEMBER.get() is not None
        entry = self.cache.shared(key) if is_batch else None
        if entry is None:
            entry = self.cache.take(key)
        if entry is not None and entry.loras != self.loras:
            entry = self._rewritten(entry, rewrite, patched)
        self._make_room(part, entry)
        if entry is None:
            # Inference tensors have no version counter, so writes to them go unseen.
            with torch.inference_mode(False), torch.no_grad():
                module = self._loaded(load)
            entry = _Entry(
                self.plan.model,
                part.device,
                module,
                ComponentState(module),
                self.loras,
                frozenset(patched),
            )
        if is_batch:
            self.cache.share(key, entry)
        self._lent[name] = (key, entry)
        return entry.module  # type: ignore[return-value]

    def _rewritten(
        self, entry: _Entry, rewrite: Rewrite, patched: Collection[str]
    ) -> _Entry | None:
        """A component with the LoRAs of this run in place of its own; None if it can't be."""
        with torch.inference_mode(False), torch.no_grad():
            if not rewrite(entry.module, entry.patched.union(patched)):
                return None
        state = ComponentState(entry.module)
        return replace(entry, state=state, loras=self.loras, patched=frozenset(patched))

    def _loaded(self, load: Callable[[], _Module]) -> _Module:
        found = catch_out_of_memory(load)
        if not isinstance(found, OutOfMemory):
            return found
        self.free_others()  # another program may have taken memory since the plan
        return load()

    def _make_room(self, component: ComponentPlan, entry: _Entry | None) -> None:
        """Free others, so that all that the stage needs fits into the memory that was planned."""
        lent = self.cache.lent_bytes(component.device, (each for _, each in self._lent.values()))
        needed = lent + component.working_bytes
        needed += component.weight_bytes if entry is None else entry.state.num_bytes
        usable = int(self.plan.device.free_memory * USABLE_SHARE)
        self.cache.make_room(component.device, max(0, usable - needed))

    def free_others(self) -> bool:
        """See `WarmComponents`."""
        return self.cache.make_room(self.plan.device.torch_name, 0)

    def drop(self, component: str) -> None:
        """Don't give back a component that was changed, nor what it encoded."""
        if component in self._lent:
            self.cache.release(*self._lent.pop(component), is_intact=False)
        self._pending = {k: v for k, v in self._pending.items() if v[0] != component}

    def give_back(self) -> None:
        """Give all components back that are as they were, and what was encoded."""
        for name, (key, entry) in self._lent.items():
            if not self.cache.release(key, entry, is_intact=True):
                continue
            changed = entry.state.restore()
            if changed:
                _log.info("%s of %s does not stay in memory: %s", name, entry.model, changed)
            else:
                self.cache.put(key, entry)
        for inputs, (_, results) in self._pending.items():
            self.cache.keep_encoded(inputs, results)
        self._lent, self._pending = {}, {}

    def drop_all(self) -> None:
        """Give nothing back."""
        for key, entry in self._lent.values():
            self.cache.release(key, entry, is_intact=False)
        self._lent, self._pending = {}, {}

    @contextmanager
    def during_stage(self) -> Iterator[None]:
        """See `WarmComponents`."""
        try:
            yield
        except GeneratorExit:
            self.give_back()
            raise
        except BaseException:
            self.drop_all()
            raise
        self.give_back()

    def note(self, event: Event) -> None:
        """See `WarmComponents`."""
        if isinstance(event, Repaired) and event.component:
            self.drop(event.component)
        elif isinstance(event, Repaired):
            self.drop_all()

    def find_encoded(self, component: str, stage: object, inputs: object) -> tuple[Hashable, Any]:
        """See `WarmComponents`."""
        key = self._key(component)
        what = digest_of(inputs)
        if key is None or what is None:
            return None, None
        settings = replace(self.plan.settings, prompt="", negative_prompt=None, seed=0)
        whole = (key, type(stage).__module__, type(stage).__qualname__, repr(settings), what)
        return whole, self.cache.find_encoded(whole)

    def keep_encoded(self, key: Hashable, component: str, results: Any) -> None:
        """See `WarmComponents`; what a component made that was changed meanwhile is dropped."""
        if key is not None and component in self._lent:
            self._pending[key] = (component, results)

    def _key(self, name: str) -> _Key | None:
        """What a component is made of; None for one that does not stay."""
        part = self.plan.component(name)
        # Offloaded weights have state of their own, and are on the device briefly.
        moves = part.block_offload or part.model_offload or part.num_weight_shards > 1
        if moves or part.device != self.plan.device.torch_name:
            return None
        how = (part.name, part.device, part.precision, part.repairs, part.fast_paths)
        return (self.identity, self.plan.num_threads, repr(how)), self.loras


def _num_bytes(results: Any) -> int:
    return sum(each.nbytes for each in tensors_in(results))


def _collect() -> None:
    """Free unreferenced memory, also of reference cycles: hooks and modules refer to each other."""
    gc.collect()
    empty_cache()
