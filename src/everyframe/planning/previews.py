"""Plan the previews of a run: how often, and by what latents become pictures."""

from __future__ import annotations

from everyframe.core.errors import InputError
from everyframe.core.paths import expand_path
from everyframe.core.plan import PreviewPlan, Settings
from everyframe.core.request import Request
from everyframe.runtime.interface import ModelSpec
from everyframe.runtime.previews.latent_space import LatentSpace, PreviewableSpec

#: Approximate number of previews of a video.
_NUM_PREVIEWS = 12


def plan_previews(
    request: Request, model: ModelSpec, settings: Settings
) -> tuple[PreviewPlan | None, tuple[str, ...]]:
    """The previews that the request asks for, and notes; None without them.

    Raises:
        InputError: the model has no latents to show.
    """
    if not request.preview and request.preview_decoder is None:
        return None, ()
    space = model.latent_space if isinstance(model, PreviewableSpec) else None
    if space is None:
        raise InputError(f"preview has no effect on {model.title}: its latents are not known")
    interval = max(1, round(settings.num_inference_steps / _NUM_PREVIEWS))
    often = "each step" if interval == 1 else f"every {interval} steps"
    if request.preview_decoder is not None:
        return _by_decoder(request.preview_decoder, space, interval, often)
    colors = space.colors()
    if colors is None:
        later = (
            "no previews in this run: the colours of this autoencoder's latents are not known yet, "
            "and are fitted to its video"
        )
        return PreviewPlan(interval, ""), (later,)
    return PreviewPlan(interval, colors.source), (f"previews {often}, by {colors.source}",)


def _by_decoder(
    path: str, space: LatentSpace, interval: int, often: str
) -> tuple[PreviewPlan, tuple[str, ...]]:
    # Late import: brings torch.
    from everyframe.runtime.previews.tiny_autoencoder import TinyDecoder

    place = expand_path(path, "preview_decoder")
    if not place.exists():
        raise InputError(f"preview_decoder {path!r} is no file or folder here")
    channels = TinyDecoder(place).channels
    if channels != space.channels:
        raise InputError(
            f"preview_decoder {path!r} decodes latents of {channels} channels, and this model's "
            f"have {space.channels}; give one of the same autoencoder"
        )
    source = f"the tiny autoencoder {place.name}"
    return PreviewPlan(interval, source, str(place.absolute())), (f"previews {often}, by {source}",)
