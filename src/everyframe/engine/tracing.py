"""Record module-level traces of runs or of user modules, and compare two of them.

`everyframe.numerics.trace` defines traces and their comparison. This module adds what depends on
requests, pipelines and models: which modules exist, what must be equal between two traces, and how
a component is loaded for a replay.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from torch import nn

from everyframe.core.errors import InputError, NumericsError, did_you_mean
from everyframe.core.events import Event, Planned, WeightsReady
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine.records.recorded_request import record_in, request_from
from everyframe.engine.run import stream
from everyframe.families.registry import stages_of
from everyframe.hardware.device_loss import translate_device_loss
from everyframe.numerics.heat_map import draw_comparison
from everyframe.numerics.trace import file
from everyframe.numerics.trace.diff import Comparison, TracePlace, compare
from everyframe.numerics.trace.output_check import check_place
from everyframe.numerics.trace.recorder import Recorder
from everyframe.numerics.trace.replay import Replayed, is_kept, replay
from everyframe.planning.resolve import prepare
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.strict_float32 import strict_float32
from everyframe.precision.upcast import held_in
from everyframe.runs.run_state import SaveOptions
from everyframe.runtime.components.component_observers import on_component_loaded
from everyframe.runtime.interface import VideoState

AnyPath = str | PathLike[str]


def record(
    request: Request, path: AnyPath, full: Sequence[str] = (), *, num_threads: int | None = None
) -> Iterator[Event]:
    """Run a request as `stream` does and write the trace of all its modules at the end.

    A run that ends with `NumericsError` writes its trace too.

    Raises:
        InputError: the trace can't be written there, a module of `full` doesn't exist, or the
            request is for several devices: each rank calls its modules with a part of the video.
    """
    if request.num_ranks > 1:
        raise InputError("a trace is recorded on one device; leave out the others")
    place = check_place(path)
    recorder = Recorder(full, held_in)
    # Not resumable: a resumed run would have no trace of its beginning.
    events = stream(request, num_threads=num_threads, keep=SaveOptions(None))
    same: Mapping[str, str] = {}
    about: Mapping[str, str] = {}
    ended: NumericsError | None = None
    try:
        while True:
            # Entered per event: the consumer may load its own models between events.
            with on_component_loaded(recorder.watch):
                try:
                    event = next(events, None)
                except NumericsError as error:
                    ended, event = error, None
            if event is None:
                break
            if isinstance(event, Planned):
                _check_components(full, event.plan)
            if isinstance(event, WeightsReady):
                same, about = _of_a_run(event.record)
            yield event
    finally:
        recorder.remove()
        events.close()
    file.write(recorder.trace(same, about, str(ended or "")), place)
    if ended is not None:
        raise ended
    _check_called(recorder)


@contextmanager
def recording(what: Any, path: AnyPath, *, full: Sequence[str]) -> Iterator[None]:
    """Context: trace every call of these modules, and write the trace at the end.

    `what` is a module (its component is named ``model``), a mapping of modules by name, or a
    diffusers pipeline. `full` names modules whose tensors are stored whole, such as
    ``unet.mid_block``. The trace is written even if the block raises.

    Raises:
        InputError: nothing to trace, no module of such a name, or the trace can't be written there.
    """
    place = check_place(path)
    modules = modules_of(what)
    unknown = [name for name in full if name.split(".")[0] not in modules]
    if unknown:
        raise InputError(
            f"there is no component of {unknown[0]!r}{did_you_mean(unknown[0], modules)} "
            f"(there are {', '.join(modules)})"
        )
    recorder = Recorder(full, held_in)
    same, about = _of_modules(modules)
    ended = ""
    try:
        for name, module in modules.items():
            recorder.watch(name, module)
        yield
    except Exception as error:
        ended = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise
    finally:
        recorder.remove()
        trace = recorder.trace(same, about, ended)
        if trace.calls:
            file.write(trace, place)
    if not trace.calls:
        raise InputError(f"none of {', '.join(modules)} was called in the block: nothing to trace")
    _check_called(recorder)


def modules_of(what: Any) -> dict[str, nn.Module]:
    """Modules by name of one module, a mapping or a pipeline.

    Raises:
        InputError: there are none.
    """
    if isinstance(what, nn.Module):
        return {"model": what}
    parts = what if isinstance(what, Mapping) else getattr(what, "components", None)
    found = {str(name): part for name, part in (parts or {}).items() if isinstance(part, nn.Module)}
    if not found:
        raise InputError(
            "what is traced must be a torch module, several by name, or a diffusers pipeline, "
            f"got {type(what).__name__}"
        )
    return found


Find = Callable[[str], nn.Module]
"""Gives a component's module by name. Raises `InputError` where it can't."""


@dataclass(frozen=True)
class TraceVerdict:
    """Result of a trace comparison.

    Attributes:
        compared: the comparison of all calls.
        place: the source of the first unexplained difference; None if all are explained.
        replayed: places recomputed in float32.
        notes: what else a person should know.
    """

    compared: Comparison
    place: TracePlace | None
    replayed: tuple[Replayed, ...]
    notes: tuple[str, ...]

    @property
    def is_explained(self) -> bool:
        """Whether precision explains every difference."""
        return self.place is None

    def png(self, title: str) -> bytes:
        return draw_comparison(self.compared, title)

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain data, as the command line prints it."""
        place = None
        if self.place is not None:
            seen = self.compared.a.seen[self.place.seen]
            call = self.compared.a.calls[seen.call]
            name = self.compared.a.parts[call.part].name
            place = {"module": name, "call": call.number, "kind": seen.kind, "tensor": seen.name}
            rest = {k: v for k, v in asdict(self.place).items() if k != "seen"}
            place |= {k: _finite(v) for k, v in rest.items()}
        replayed = [
            {"module": each.name, "errors": [_finite(error) for error in each.errors],
             "explained": [*each.explained], "growth": _finite(each.growth), "wrong": [*each.wrong]}
            for each in self.replayed
        ]  # fmt: skip
        return {
            "type": "trace_diff",
            "explained": self.is_explained,
            "place": place,
            "largest": _finite(self.compared.largest),
            "num_calls": len(self.compared.partners),
            "replayed": replayed,
            "notes": [*self.notes],
        }


def diff(
    a: AnyPath, b: AnyPath, find: Find | None = None, *, model: str | None = None
) -> TraceVerdict:
    """Compare two traces; see `everyframe.numerics.trace.diff`.

    A place that precision does not explain is replayed with the module that `find` returns, if both
    traces store its tensors whole; growth of an earlier difference is skipped. Without `find`, the
    model of a traced Everyframe run is loaded. `model` overrides where that model is found.

    Raises:
        InputError: not traces, or traces of runs that can't be compared, with the reason.
        DeviceLostError: the device of a replay was lost.
    """
    compared = compare(file.read(a), file.read(b))
    finder = find or model_of(compared.a.about, model)
    replayed: list[Replayed] = []
    notes = list(compared.notes)
    for place in compared.places:
        call = compared.a.seen[place.seen].call
        if place.is_between:
            call = compared.a.calls[call].parent
        if compared.a.seen[place.seen].kind == "weight" or call < 0 or not is_kept(compared, call):
            return TraceVerdict(compared, place, tuple(replayed), tuple(notes))
        part = compared.a.parts[compared.a.calls[call].part]
        try:
            module = finder(part.component).get_submodule(part.module)
            with strict_float32():
                found = replay(compared, call, module)
        except InputError as error:
            notes.append(str(error))
            return TraceVerdict(compared, place, tuple(replayed), tuple(notes))
        replayed.append(found)
        if found.wrong:
            return TraceVerdict(compared, place, tuple(replayed), tuple(notes))
    return TraceVerdict(compared, None, tuple(replayed), tuple(notes))


def model_of(about: Mapping[str, str], model: str | None = None) -> Find:
    """Finder that loads components as the traced run did, on this machine and in float32.

    `model` overrides where the model is found, in place of its recorded name.
    """

    def find(component: str) -> nn.Module:
        if "record" not in about:
            raise InputError(
                "whole tensors were recorded, and the module to replay is not known here: give it "
                "from Python, everyframe.trace_diff(a, b, what)"
            )
        more: dict[str, Any] = {} if model is None else {"model": model}
        request = request_from(_record_of(about), {"dtype": "fp32", **more})
        prepared = prepare(request, may_fetch=False)
        device = prepared.plan.device
        with translate_device_loss(
            f"{device.torch_name} ({device.name})", f"while {component} was loaded"
        ):
            return _component(prepared.plan, prepared.model, component)

    return find


def _record_of(about: Mapping[str, str]) -> Mapping[str, Any]:
    """The record in a trace; untrusted, like any file."""
    try:
        return record_in(json.loads(about["record"]))
    except (ValueError, RecursionError) as error:
        raise InputError(f"the record in the first trace can't be read: {error}") from None


def _component(plan: Plan, model: Any, name: str) -> nn.Module:
    found: dict[str, nn.Module] = {}
    for stage in stages_of(model, plan, 0):
        if plan.component(stage.component).stage != plan.component(name).stage:
            continue
        events: Any = stage.run([VideoState(plan.settings.seed)])
        with on_component_loaded(found.__setitem__), torch.inference_mode():
            while name not in found and next(events, None) is not None:
                pass
        events.close()
        if name in found:
            return found[name]
    raise InputError(f"the model has no component {name!r} that could be loaded alone")


def _of_a_run(record: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """What must be equal in another trace of a run, and what is only reported."""
    settings = dict(record["settings"])
    size = f"{settings.pop('width')}x{settings.pop('height')}"
    same = {"model": record["model"]["name"], "weights": str(record["model"]["sha256"])}
    same |= {"size": size, "frames": str(settings.pop("num_frames"))}
    same |= {"steps": str(settings.pop("num_inference_steps"))}
    same |= {name.replace("_", " "): _plain(value) for name, value in settings.items()}
    plan = record["plan"]
    dtypes = {part["name"]: part["precision"]["compute"] for part in plan["components"]}
    kept = {part["name"]: part["precision"].get("weight_dtype") for part in plan["components"]}
    same |= {f"weights of {name}": kind for name, kind in kept.items() if kind}
    about = {
        "precision": ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()),
        "device": plan["device"]["name"],
        "torch": torch.__version__,
        "record": json.dumps(record),
    }
    return same, about


def _of_modules(modules: Mapping[str, nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    same, dtypes, devices = {}, [], set()
    for name, module in modules.items():
        same[name] = type(module).__name__
        same[f"parameters of {name}"] = str(sum(each.numel() for each in module.parameters()))
        config = getattr(module, "config", None)
        if isinstance(config, Mapping):
            plain = {k: v for k, v in config.items() if not k.startswith("_") and "dtype" not in k}
            same[f"config of {name}"] = hashlib.sha256(_plain(plain).encode()).hexdigest()[:12]
        found = {dtype_name(each.dtype) for each in module.parameters()}
        dtypes.append(f"{name} {' and '.join(sorted(found))}")
        devices |= {each.device for each in module.parameters()}
    about = {
        "precision": ", ".join(dtypes),
        "device": ", ".join(sorted({_device_name(device) for device in devices})),
        "torch": torch.__version__,
    }
    if any(device.type == "cuda" for device in devices):
        uses_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        about["float32 products"] = "tf32" if uses_tf32 else "float32"
    return same, about


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _finite(value: Any) -> Any:
    """Replace infinity and not-a-number, which JSON lacks, by their names."""
    is_number = not isinstance(value, float) or math.isfinite(value)
    return value if is_number else str(value)


def _check_components(full: Sequence[str], plan: Plan) -> None:
    known = [each.name for each in plan.components]
    for name in full:
        if name.split(".")[0] not in known:
            raise InputError(
                f"there is no component of {name!r} in {plan.model}"
                f"{did_you_mean(name.split('.')[0], known)} (there are {', '.join(known)})"
            )


def _check_called(recorder: Recorder) -> None:
    missing = recorder.never_called()
    if missing:
        raise InputError(f"{missing[0]} was never called, so none of its tensors were stored")
