"""The latents of an autoencoder, and the linear maps from them to colours that are known.

Published maps are data with their source (`latent_rgb_factors.json`). Others are fitted by
`preview_fit.py` and cached by the digest of the autoencoder's weights. No torch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from everyframe.checkpoints.digest import digest, known_digest
from everyframe.checkpoints.folder import cache_folder, package_folder
from everyframe.core.paths import replace_file

_log = logging.getLogger(__name__)
_SCHEMA = "everyframe.latent_colors/1"

#: Bytes of weights that a plan hashes, in a tenth of a second.
_READ_AT_ONCE = 64 * 2**20


@dataclass(frozen=True)
class LatentColors:
    """Linear map of latents to pixels in -1..1.

    Attributes:
        factors: red, green and blue of each channel.
        bias: red, green and blue of latents of 0.
        source: where it comes from.
    """

    factors: tuple[tuple[float, float, float], ...]
    bias: tuple[float, float, float]
    source: str


@dataclass(frozen=True)
class LatentSpace:
    """What a denoiser's clean latents are.

    Attributes:
        autoencoder: class of the autoencoder, by diffusers' name where it has one.
        channels: channels of the latents.
        scaling_factor: factor of the latents in its config.
        layout: axes of the sampler's state: ``b``, ``c``, ``t``, ``h``, ``w``.
        spatial_factor: pixels for each latent, along each side.
        files: weight files of the autoencoder.
        own_digest: gives the digest of an autoencoder in memory.
    """

    autoencoder: str
    channels: int
    scaling_factor: float | None = None
    layout: str = "b c t h w"
    spatial_factor: int = 8
    files: tuple[str, ...] = ()
    own_digest: Callable[[], str] | None = None

    def digest(self, *, reads: bool) -> str | None:
        """Digest of its weights; without `reads` None for large files that were not hashed yet."""
        if self.own_digest is not None:
            return self.own_digest()
        if not self.files:
            return None
        is_small = sum(Path(file).stat().st_size for file in self.files) <= _READ_AT_ONCE
        return digest(self.files) if reads or is_small else known_digest(self.files)

    def colors(self, *, reads: bool = False) -> LatentColors | None:
        """The map that is known for it: one fitted to its weights, else the published one."""
        key = self.digest(reads=reads)
        fitted = None if key is None else _fitted_colors(key, self.channels)
        return fitted or self._published_colors()

    def keep(self, colors: LatentColors) -> None:
        """Cache a map that was fitted to it. Raises `OSError`."""
        key = self.digest(reads=True)
        assert key is not None
        replace_file(_path(key), json.dumps({"schema": _SCHEMA, **asdict(colors)}))

    def _published_colors(self) -> LatentColors | None:
        data = _load_published()
        for name, each in data["spaces"].items():
            is_scaled = each["scaling_factor"] in (None, self.scaling_factor)
            if self.autoencoder in each["classes"] and is_scaled:
                source = f"published factors for {name}"
                found = _colors({**each, "source": source}, self.channels)
                if found is not None:
                    return found
        return None


@runtime_checkable
class PreviewableSpec(Protocol):
    """A model whose latents can be shown while it runs."""

    @property
    def latent_space(self) -> LatentSpace | None:
        """The latents of its sampler; None if they are not known."""
        ...


def vae_latents(spec: Any, autoencoder: str, channels: int, **more: Any) -> LatentSpace:
    """Latents of the component ``vae`` of a model spec; `more` are further fields."""
    files = () if spec.missing() else spec.opened_weights("vae")[0].files
    return LatentSpace(autoencoder, channels, files=tuple(map(str, files)), **more)


@cache
def _load_published() -> Any:
    path = package_folder("runtime/latent_rgb_factors.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _path(key: str) -> Path:
    """The file of a fitted map; whatever software made it, it is of these weights."""
    return cache_folder() / "latent_colors" / f"{key}.json"


def _fitted_colors(key: str, channels: int) -> LatentColors | None:
    path = _path(key)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}")
        found = _colors(data, channels)
    except FileNotFoundError:
        found = None
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("the colours in %s can't be read (%s); they are fitted again", path, error)
        found = None
    return found or _colors(_load_published()["fitted"].get(key), channels)


def _colors(data: Any, channels: int) -> LatentColors | None:
    """The map in plain data; None if it is none of so many channels. `ValueError` for others."""
    if data is None or len(data["factors"]) != channels:
        return None
    red, green, blue = map(float, data["bias"])
    rows = tuple((float(r), float(g), float(b)) for r, g, b in data["factors"])
    if not all(map(math.isfinite, (red, green, blue, *(value for row in rows for value in row)))):
        raise ValueError("a factor is not finite")
    return LatentColors(rows, (red, green, blue), str(data["source"]))
