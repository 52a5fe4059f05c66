"""The Python surface: `generate`, `run`, `stream`, `plan`, `trace`. Flags are keywords here.

Read next: `core/request.py` for the options, `engine/run.py` for what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from everyframe.core.errors import InputError
from everyframe.core.events import Event, Frames, Planned, VideoDone
from everyframe.core.events import Sound as SoundMade
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine import run as engine
from everyframe.engine import tracing
from everyframe.engine.launch import launched, ranks_of
from everyframe.engine.moving import OF_RANKS
from everyframe.engine.process import Job
from everyframe.engine.record import recorded_threads, request_from
from everyframe.engine.resuming import go_on, read_run
from everyframe.families.registry import check_option_names, family_options
from everyframe.media.paths import exact_fps
from everyframe.media.pixels import to_uint8
from everyframe.media.record import read_record
from everyframe.media.sound import Sound
from everyframe.media.video import Video
from everyframe.planning.resolve import GivenModel, resolve
from everyframe.runs import listing
from everyframe.runs.folder import RunFolder, find_run, root_of, runs_folder
from everyframe.runs.keeper import Keep
from everyframe.runs.listing import Listed

Output = Literal["uint8", "float"]


def generate(
    prompt: str | None = None,
    *,
    output: Output = "uint8",
    from_record: str | Path | Mapping[str, Any] | None = None,
    isolate: bool = False,
    run_dir: str | Path | None = None,
    **options: Any,
) -> Video | list[Video]:
    """Make a video; a list of them if ``num_videos`` is more than 1.

    How far it comes is kept until it is done, so that `resume` goes on with it.

    Args:
        prompt: what it shows.
        output: ``"uint8"`` gives frames (T, H, W, 3) as ``round(255 x)``, ``"float"`` the float32
            in 0..1 before rounding.
        from_record: a video, sidecar or record to make again; other options overrule it.
        isolate: compute in a process of its own, whose death is an error that says where it was.
            Several devices (``num_devices=3``) have one each in any case, also in a notebook.
        run_dir: the folder of runs to keep it in; ``"off"`` keeps nothing.
        options: every option of `Request` and of the model's family.

    Raises:
        InputError: something can't be asked for. CannotRunError: this machine is too small for it.
        WorkerDiedError: a process of `isolate`, or of one of several devices, died.
    """
    _check_output(output)
    given = options if prompt is None else {"prompt": prompt, **options}
    request, num_threads = _request(given, from_record)
    root, as_uint8 = root_of(run_dir), output == "uint8"
    if isolate or request.num_ranks > 1:
        job = Job(request, num_threads=num_threads, root=root, as_uint8=as_uint8)
        events = launched(job.of_ranks(request.num_ranks))
    else:
        keep = Keep(root, as_uint8=as_uint8)
        events = engine.stream(request, num_threads=num_threads, keep=keep)
    videos = list(_videos(events, output))
    return videos if request.num_videos > 1 else videos[0]


def resume(
    run: str | Path | None = None,
    *,
    pipe: Any = None,
    output: Output = "uint8",
    **devices: Any,
) -> Video | list[Video]:
    """Go on with a run that was broken off; the videos are those of an unbroken one, bit for bit.

    Args:
        run: its name or folder (see `list_runs`); without one, the last that was broken off.
        pipe: the loaded pipeline, for a run of `everyframe.run`.
        output: as in `generate`; what was kept of earlier clips for ``"uint8"`` is no finer.
        devices: ``num_devices``, ``devices``, ``parallel``, ``shares`` and ``shard_weights`` of
            `generate`, to go on with others than it was begun with; then the videos are the same
            but for rounding.

    Raises:
        InputError: there is no such run, or something that it needs was changed.
    """
    _check_output(output)
    folder = find_run(run)
    begun = read_run(folder)
    if output == "float" and begun.as_uint8 and begun.plan.settings.chain > 1:
        raise InputError(f'{folder.name} was begun for output="uint8"; its clips are kept so')
    given = None
    if pipe is not None:
        given = GivenModel("pipeline", _model_of(pipe, begun.request))
    number = _ranks_to_go_on_with(folder, devices, pipe)
    if number > 1:
        job = Job(run=folder.path, as_uint8=output == "uint8", ranks=devices or None)
        events = launched(job.of_ranks(number), begun.place if begun.place.is_dir() else None)
    else:
        events = go_on(folder, given_model=given, ranks=devices or None)
    videos = list(_videos(events, output))
    return videos if begun.plan.settings.num_videos > 1 else videos[0]


def _ranks_to_go_on_with(folder: RunFolder, devices: Mapping[str, Any], pipe: Any) -> int:
    unknown = sorted(devices.keys() - set(OF_RANKS))
    if unknown:
        raise InputError(f"resume takes {', '.join(OF_RANKS)} and no {', '.join(unknown)}")
    if devices and pipe is not None:
        raise InputError("a pipeline in memory works where it is; leave out the devices")
    return Request(**devices).num_ranks if devices else ranks_of(folder)


def list_runs(run_dir: str | Path | None = None) -> list[Listed]:
    """The runs that can be gone on with, oldest first."""
    return listing.list_runs(root_of(run_dir))


def run(
    pipe: Any,
    prompt: str | None = None,
    *,
    output: Output = "uint8",
    on_event: Callable[[Event], None] | None = None,
    from_record: str | Path | Mapping[str, Any] | None = None,
    **options: Any,
) -> Video | list[Video]:
    """Make a video with a diffusers pipeline that is loaded already; a list for several.

    The pipeline runs as it is, on its device and in its dtypes, and is left as it was.

    Args:
        pipe: a text or image to video pipeline of diffusers, plain or modular.
        prompt: what the video shows.
        output: as in `generate`.
        on_event: called with each event as it happens; see `core.events`.
        from_record: a video, sidecar or record to make again; other options overrule it.
        options: every option of `Request`, and every parameter of the pipeline's own call.

    Raises:
        InputError: no video pipeline, or something that can't be asked of it.
    """
    _check_output(output)
    given = options if prompt is None else {"prompt": prompt, **options}
    request, num_threads = _request_of_pipe(given, from_record)
    events = _events_of_pipe(pipe, request, num_threads)
    videos = list(_videos(_told(events, on_event), output))
    return videos if request.num_videos > 1 else videos[0]


def stream(request: Request, *, pipe: Any = None) -> Iterator[Event]:
    """Stages and steps as they happen; frames come as they are decoded. See `core.events`.

    With `pipe`, a loaded diffusers pipeline, it is that which runs; see `run`.
    """
    if pipe is not None:
        return _events_of_pipe(pipe, request, None)
    if request.num_ranks > 1:
        return launched(Job(request, root=runs_folder()).of_ranks(request.num_ranks))
    return engine.stream(request)


def plan(
    request: Request | str | None = None, *, profile: str | Path | None = None, **options: Any
) -> Plan:
    """What would run, in which precision, with how much memory and about how long.

    Nothing is loaded or fetched. Takes a request, or what `generate` takes: a prompt and options.
    `profile` plans for a machine that is not here: a shipped profile's name or a file of facts.
    """
    if isinstance(request, Request):
        if options:
            raise InputError(f"a request and options ({', '.join(options)}); give one of them")
        return resolve(request, profile)
    given = options if request is None else {"prompt": request, **options}
    return resolve(Request(**given), profile)


def trace(what: Any, path: str | Path, *, full: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Keep what every module computes in the block, as fingerprints that are small enough to mail.

    ``with everyframe.trace(pipe, "a.trace"): pipe(...)``; the file is written at the end of the
    block, also of one that raises. Nothing that is computed changes by it.

    Args:
        what: a torch module, several by name, or a diffusers pipeline.
        path: where to.
        full: modules whose tensors are kept whole, such as ``unet.mid_block``, so that they can be
            replayed; a lone module is called ``model``.

    Raises:
        InputError: nothing to trace, no such module, or a file that can't be written.
    """
    return tracing.recording(what, path, full=full)


def trace_diff(a: str | Path, b: str | Path, what: Any = None) -> tracing.Verdict:
    """The first place where two traces differ by more than precision explains.

    ``.is_explained`` says whether there is none, ``.place.says`` what it is, ``.png(title)`` draws
    all differences. `what`, the modules that were traced, is for replays of those that both traces
    hold whole; without it the model of a run of ours is loaded when it is needed.

    Raises:
        InputError: no traces, or of runs that can't be compared, and why.
    """
    if what is None:
        return tracing.diff(a, b)
    modules = tracing.modules_of(what)

    def find(component: str) -> Any:
        if component not in modules:
            raise InputError(f"no {component!r} among {', '.join(modules)}, which were given")
        return modules[component]

    return tracing.diff(a, b, find)


def _model_of(pipe: Any, request: Request) -> Any:
    # Not on top: this brings diffusers.
    from everyframe.families.pipeline.given import given_pipeline

    return given_pipeline(pipe, family_options("pipeline", request))


def _events_of_pipe(pipe: Any, request: Request, num_threads: int | None) -> Iterator[Event]:
    # Not on top: this brings diffusers.
    from everyframe.families.pipeline.given import in_our_words

    check_option_names(request)
    request = in_our_words(pipe, request)
    model = _model_of(pipe, request)
    here = Request(**{**request.given(), "device": model.device})
    given = GivenModel("pipeline", model)
    return engine.stream(here, num_threads=num_threads, given_model=given)


def _request_of_pipe(
    given: Mapping[str, Any], from_record: str | Path | Mapping[str, Any] | None
) -> tuple[Request, int | None]:
    """The request of `run`'s options: what is no option of ours is a parameter of the pipeline."""
    from everyframe.families.registry import options_of

    known = {*Request.model_fields, *options_of("pipeline").model_fields}
    ours = {name: value for name, value in given.items() if name in known}
    rest = {name: value for name, value in given.items() if name not in known}
    if rest:
        ours["option"] = {**(ours.get("option") or {}), **rest}
    if from_record is None:
        return Request(**ours), None
    record = from_record if isinstance(from_record, Mapping) else read_record(from_record)
    # The model is the one that was given here, and it is where it is.
    asked = {k: v for k, v in record.get("request", {}).items() if k not in ("model", "device")}
    return request_from({**record, "request": asked, "model": {}}, ours), recorded_threads(record)


def _told(events: Iterator[Event], tell: Callable[[Event], None] | None) -> Iterator[Event]:
    for event in events:
        if tell is not None:
            tell(event)
        yield event


def _check_output(output: str) -> None:
    if output not in ("uint8", "float"):
        raise InputError(f'output must be "uint8" or "float", got {output!r}')


def _request(
    given: Mapping[str, Any], from_record: str | Path | Mapping[str, Any] | None
) -> tuple[Request, int | None]:
    if from_record is None:
        return Request(**given), None
    record = from_record if isinstance(from_record, Mapping) else read_record(from_record)
    return request_from(record, given), recorded_threads(record)


def _videos(events: Iterator[Event], output: Output) -> Iterator[Video]:
    frames: dict[int, list[np.ndarray[Any, Any]]] = {}
    sounds: dict[int, Sound] = {}
    fps = Fraction(0)
    for event in events:
        if isinstance(event, Planned):
            # Before hours of work: not every number is a frame rate that can be had.
            fps = exact_fps(event.plan.settings.fps)
        elif isinstance(event, SoundMade):
            sounds[event.seed] = Sound(event.samples, event.rate)
        elif isinstance(event, Frames):
            pieces = frames.setdefault(event.seed, [])
            first = sum(len(piece) for piece in pieces)
            # Checked for non-finite values before any rounding, whichever form is wanted.
            whole = to_uint8(event.frames, first_index=first)
            pieces.append(whole if output == "uint8" else event.frames)
        elif isinstance(event, VideoDone):
            whole = np.concatenate(frames.pop(event.seed))
            yield Video(whole, fps, event.record, sounds.pop(event.seed, None))
