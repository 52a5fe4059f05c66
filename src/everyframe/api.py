"""Python API: `generate`, `resume`, `run`, `stream`, `plan`, `trace`; flags are keyword arguments.

Read next: `core/request.py` (options), `engine/run.py` (execution).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from everyframe.core.call_signature import with_options
from everyframe.core.errors import InputError
from everyframe.core.events import Event, Events
from everyframe.core.events import Output as PipelineOutput
from everyframe.core.option_values import with_current_names
from everyframe.core.options import Options, shown
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.engine import run as engine
from everyframe.engine import tracing
from everyframe.engine.generate_call import GenerateCall, check_output, load_run_for
from everyframe.engine.records.comparison import compare_with
from everyframe.engine.records.recorded_request import record_in, request_from, threads_to_repeat
from everyframe.engine.results import EventDelivery, OnEvent, Output, collect_videos
from everyframe.engine.resumption.foreign_run import check_named, find_here
from everyframe.engine.resumption.replan import OF_RANKS
from everyframe.engine.resumption.resume import find_run_of, resume_run
from everyframe.engine.workers.launcher import ranks_of, run_in_workers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.families.registry import (
    all_options,
    check_option_names,
    family_options,
    options_of,
)
from everyframe.media.video import Video
from everyframe.planning.input_checks import check_input_files
from everyframe.planning.resolve import LoadedModel, resolve
from everyframe.runs import folder as run_folders
from everyframe.runs.folder import RunSummary, find_run, root_of, runs_folder

_ALL: tuple[type[Options], ...] = (Request, *all_options().values())


@with_options(_ALL)
def generate(
    prompt: str | None = None,
    *,
    output: Output = "uint8",
    from_record: str | Path | Mapping[str, Any] | Video | None = None,
    isolate: bool = False,
    run_dir: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> Video | list[Video]:
    """Make a video; with ``num_videos`` above 1, return a list in the order of their seeds.

    Progress is saved until the run is done, so that `resume` can continue it. Each note or repair
    that the command line prints is an `EveryframeWarning`.

    Args:
        prompt: what the video shows.
        output: ``"uint8"`` gives frames (T, H, W, 3) as ``round(255 x)``, ``"float"`` the float32
            in 0..1 before rounding.
        from_record: a video, its file, a sidecar or a record; other options override it.
        isolate: compute in a separate process, whose crash is an error with the last position.
            Several devices (``num_devices=3``) always have one process each, also in a notebook.
        run_dir: the folder of runs to save in; ``"off"`` saves nothing.
        on_event: called with each event as it happens; see `core.events`.
        options: every option of `Request` and of the model's family.

    Raises:
        InputError: an option is invalid.
        CannotRunError: this machine is too small for it.
        WorkerDiedError: a process of `isolate`, or of one of several devices, crashed.
    """
    call = GenerateCall.of(prompt, output, from_record, run_dir, options)
    if isolate or call.request.num_ranks > 1:
        check_input_files(call.request)
        events = run_in_workers(call.job)
    else:
        events = engine.stream(call.request, num_threads=call.num_threads, keep=call.keep)
    return call.videos(events, on_event)


@with_options([Request], only=OF_RANKS, is_open=True)
def resume(
    run: str | Path | None = None,
    *,
    pipe: Any = None,
    output: Output = "uint8",
    trust_remote_code: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> Video | list[Video] | Any:
    """Resume an interrupted run; the videos equal those of an uninterrupted run, bit for bit.

    An `EveryframeWarning` names the run and where it resumes.

    Args:
        run: its name or folder (see `list_runs`); by default the latest interrupted run, or with
            `pipe` the latest of that pipeline.
        pipe: the loaded pipeline, for a run of `everyframe.run`; another pipeline is refused.
        output: as in `generate`; frames of earlier clips saved for ``"uint8"`` are no finer.
        trust_remote_code: allow code that comes with the checkpoint; must be given again.
        on_event: as in `generate`.
        options: ``num_devices``, ``devices``, ``parallel``, ``shares`` and ``shard_weights`` of
            `generate`, to resume on other devices; then the videos are equal up to rounding. Others
            name a file or model of the run again (``image="cat.png"``), which a run needs that
            somebody else made.

    Raises:
        InputError: there is no such run, or something that it needs has changed.
    """
    if run is None and pipe is not None:
        folder = find_run_of(_given_model(pipe, Request(), None).digests())
    else:
        folder = find_run(run)
    begun = load_run_for(output, folder)
    delivery = EventDelivery(on_event)
    given = None if pipe is None else _given_model(pipe, begun.request, delivery.deliver_early)
    asked = Request(**{name: value for name, value in options.items() if name in OF_RANKS})
    named = find_here({name: value for name, value in options.items() if name not in OF_RANKS})
    check_named(folder, named)
    devices = asked.given() or None
    if devices and pipe is not None:
        raise InputError("a pipeline in memory works where it is; leave out the devices")
    number = asked.num_ranks if devices else ranks_of(folder)
    if number > 1:
        job = WorkerJob(run=folder.path, as_uint8=output == "uint8", ranks=devices,
                  trust_remote_code=trust_remote_code, named=named)  # fmt: skip
        events = run_in_workers(job.of_ranks(number), begun.place_of_workers)
    else:
        events = resume_run(
            folder,
            given_model=given,
            ranks=devices,
            trust_remote_code=trust_remote_code,
            named=named,
        )
    return _result(events, output, begun.request, delivery)


def list_runs(run_dir: str | Path | None = None) -> list[RunSummary]:
    """List the runs that can be resumed, oldest first."""
    return run_folders.list_runs(root_of(run_dir))


@with_options(
    [Request, options_of("pipeline")],
    is_open=True,
    negative_prompt="str | Sequence[str] | Mapping[int, str] | None",
)
def run(
    pipe: Any,
    prompt: str | list[str] | Mapping[int, str] | None = None,
    *,
    output: Output | None = None,
    on_event: Callable[[Event], None] | None = None,
    from_record: str | Path | Mapping[str, Any] | Video | None = None,
    **options: Any,
) -> Video | list[Video] | Any:
    """Make a video with a loaded diffusers pipeline; return a list for several.

    The pipeline runs as it is, on its device and in its dtypes, and is left unchanged. It is called
    in this thread with torch's current settings: autocast, threads, TF32, modes. Notes and repairs
    are warnings, as in `generate`. With ``output_type`` ``"pt"``, ``"pil"`` or ``"latent"`` the
    pipeline's own output is returned, in diffusers' format; with ``"np"`` a `Video` with frames as
    ``output="float"`` gives them.

    Args:
        pipe: a diffusers pipeline for text or image to video, standard or modular.
        prompt: what the video shows; a list makes as many videos in one call.
        output: as in `generate`.
        on_event: called with each event as it happens; see `core.events`.
        from_record: a video, its file, a sidecar or a record; other options override it.
        options: every option of `Request`, and every parameter of the pipeline's own call.

    Raises:
        InputError: not a video pipeline, or an option that it doesn't accept.
    """
    options = with_current_names(options)
    given: Mapping[str, Any] = options if prompt is None else {"prompt": prompt, **options}
    record = None if from_record is None else record_in(from_record)
    if record is None:
        given = _with_both_sides(pipe, given)
    request = _request_of_pipe(given, record)
    num_threads = None if record is None else threads_to_repeat(record)
    if output is None:
        is_float = _option_of(request).get("output_type") == "np"
        output = "float" if is_float else "uint8"
    check_output(output)
    delivery = EventDelivery(on_event)
    events = _events_of_pipe(pipe, request, num_threads, delivery.deliver_early)
    return _result(compare_with(record, events), output, request, delivery)


def stream(request: Request, *, pipe: Any = None) -> Iterator[Event]:
    """Yield stages and steps as they happen, and frames as they are decoded; see `core.events`.

    A stream closed before its end leaves an interrupted run, which `resume` continues.

    With `pipe`, a loaded diffusers pipeline, that pipeline runs; see `run`. Its call has its own
    thread, with torch's settings as they are when `stream` is called.

    Raises:
        InputError: it is no request, or an option is wrong.
    """
    if not isinstance(request, Request):
        raise InputError(
            f"stream takes a request, got {shown(request)}; give everyframe.Request(prompt=...)"
        )
    if pipe is not None:
        return _events_of_pipe(pipe, request, None)
    if request.num_ranks > 1:
        check_input_files(request)
        return run_in_workers(WorkerJob(request, root=runs_folder()).of_ranks(request.num_ranks))
    return engine.stream(request)


@with_options(_ALL)
def plan(
    request: Request | str | None = None, *, profile: str | Path | None = None, **options: Any
) -> Plan:
    """Plan a request: what would run, in which precision, with how much memory and about how long.

    Nothing is loaded or fetched.

    Args:
        request: a request, or the prompt.
        profile: plan for another machine: the name of a shipped profile, or a file of facts.
        options: the options of `generate`, without a request.
    """
    if isinstance(request, Request):
        if options:
            raise InputError(f"a request and options ({', '.join(options)}); give one of them")
        return resolve(request, profile)
    given = options if request is None else {"prompt": request, **options}
    return resolve(Request(**given), profile)


def trace(what: Any, path: str | Path, *, full: Sequence[str] = ()) -> AbstractContextManager[None]:
    """Trace what every module computes in the block, as fingerprints small enough to mail.

    ``with everyframe.trace(pipe, "a.trace"): pipe(...)``; the file is written at the end of the
    block, even if it raises. Tracing doesn't change results.

    Args:
        what: a torch module, several by name, or a diffusers pipeline.
        path: output file.
        full: modules whose tensors are stored whole, such as ``unet.mid_block``, so that they can
            be replayed; a single module is named ``model``.

    Raises:
        InputError: nothing to trace, no such module, or a file that can't be written.
    """
    return tracing.recording(what, path, full=full)


def trace_diff(a: str | Path, b: str | Path, what: Any = None) -> tracing.TraceVerdict:
    """Find the first place where two traces differ by more than precision explains.

    ``.is_explained`` says whether there is none, ``.place.message`` describes it, ``.png(title)``
    draws all differences. `what`, the traced modules, is for replays of modules that both traces
    store whole; without it, the model of an Everyframe run is loaded when needed.

    Raises:
        InputError: not traces, or traces of runs that can't be compared, with the reason.
    """
    if what is None:
        return tracing.diff(a, b)
    modules = tracing.modules_of(what)

    def find(component: str) -> Any:
        if component not in modules:
            raise InputError(f"no {component!r} among {', '.join(modules)}, which were given")
        return modules[component]

    return tracing.diff(a, b, find)


def _given_model(pipe: Any, request: Request, on_event: OnEvent | None) -> LoadedModel:
    # Late import: brings diffusers.
    from everyframe.diffusers_pipelines.loaded_pipeline import given_pipeline

    model = given_pipeline(pipe, family_options("pipeline", request), on_event)
    return LoadedModel("pipeline", model, model.digests)


def _events_of_pipe(
    pipe: Any, request: Request, num_threads: int | None, on_event: OnEvent | None = None
) -> Events:
    # Late import: brings diffusers.
    from everyframe.diffusers_pipelines.loaded_pipeline import in_our_words

    check_option_names(request)
    request = in_our_words(pipe, request)
    given = _given_model(pipe, request, on_event)
    model: Any = given.model
    return engine.stream(model.asked(request), num_threads=num_threads, given_model=given)


def _request_of_pipe(given: Mapping[str, Any], record: Mapping[str, Any] | None) -> Request:
    """The request of `run`'s options; unknown options are parameters of the pipeline."""
    from everyframe.diffusers_pipelines.inputs import call_options
    from everyframe.diffusers_pipelines.inputs.options import SHARED

    # An option by a pipeline's own name, `strength`, is a parameter of the pipeline like any other.
    known = {*Request.model_fields, *options_of("pipeline").model_fields}.difference(
        SHARED.values()
    )
    # Prompts that are not text go to the pipeline unchanged, like its own parameters.
    ours = {k: v for k, v in given.items() if k in known and not call_options.is_prompts(k, v)}
    rest = {name: value for name, value in given.items() if name not in ours}
    if rest:
        ours["option"] = {**rest, **(ours.get("option") or {})}
    if record is None:
        return Request(**ours)
    if isinstance(record.get("request"), Mapping):
        record = {**record, "request": call_options.without_overridden(record["request"], {*given})}
    # The model is the one that was given here.
    return request_from(record, ours, has_model=True)


def _with_both_sides(pipe: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete a single height or width with the pipeline's default, as its own call does."""
    sides = [given.get("height"), given.get("width")]
    if (sides[0] is None) == (sides[1] is None):
        return given
    model: Any = _given_model(pipe, Request(), None).model
    default, default_of = model.sizes.default_size(), model.sizes.interface.default_of
    is_open = [default_of(side) is None for side in ("height", "width")]
    if default is None or is_open[0] != is_open[1]:  # one alone follows from the other
        return given  # refused: nobody says how large the other one is
    chosen = [own if side is None else side for side, own in zip(sides, default, strict=True)]
    return {**given, "height": chosen[0], "width": chosen[1]}


def _option_of(request: Request) -> Mapping[str, Any]:
    """Parameters of an in-memory pipeline that the request names."""
    option = request.family_options.get("option")
    return option if isinstance(option, Mapping) else {}


def _result(events: Events, output: Output, request: Request, delivery: EventDelivery) -> Any:
    """The result of a request: a video, a list of them, or the pipeline's output."""
    from everyframe.diffusers_pipelines.inputs import call_options

    option = _option_of(request)
    is_list = request.num_videos > 1
    if call_options.wants_output(option):
        rest = delivery.deliver_rest(events)
        given = [each.output for each in rest if isinstance(each, PipelineOutput)]
        return given if is_list else given[0]
    videos = collect_videos(events, output, delivery)
    is_list = is_list or call_options.gives_list(option) or len(videos) > 1
    return videos if is_list else videos[0]
