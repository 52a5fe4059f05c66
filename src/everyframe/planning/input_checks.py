"""Check what a request names before a plan is made or a worker starts.

The command line and the API call this first, so that a refusal starts no worker. Checks that need
the plan (contents of given frames, sizes that an output can hold) are made with it.
"""

from __future__ import annotations

from everyframe.checkpoints.locate import locate
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.registry import all_options
from everyframe.media.input_checks import check_image, check_video
from everyframe.media.output_path import check_folder, check_output


def check_output_option(request: Request, output: str | None) -> None:
    """Check the output without planning, which is slow on a slow machine.

    Most sizes are checked after planning (`check_output_of`): the model's message about a size is
    more useful than the file format's. Inpainting accepts any size.

    Raises:
        InputError: the output can't be written.
    """
    if output is not None:
        length = None if request.num_frames is None else request.num_frames * request.chain
        size = request.asked_size() if "mask" in request.family_options else None
        height, width = size or (None, None)
        check_output(output, width, height, num_frames=length, fps=request.fps)


def check_input_files(request: Request) -> None:
    """Check input files without a worker, which takes seconds to start.

    Raises:
        InputError: unknown model, missing images or videos, or an invalid report folder.
    """
    if request.model is not None:
        locate(request.model, variant=request.family_options.get("variant"))
    for picture in (request.image, request.last_image):
        if isinstance(picture, str):
            check_image(picture)
    if isinstance(request.extend, str):
        check_video(request.extend)
    for options in all_options().values():
        own = {k: v for k, v in request.family_options.items() if k in options.model_fields}
        options(**own).check_named()
    if request.report is not None:
        check_folder(request.report)


def check_output_of(settings: Settings, output: str) -> None:
    """Check that a video with these settings can be written to `output`.

    Raises:
        MediaError: the path or the size can't be written.
    """
    check_output(
        output,
        settings.width,
        settings.height,
        num_frames=settings.num_frames * settings.chain,
        fps=settings.fps,
    )
