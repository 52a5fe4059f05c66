"""Call options of diffusers: output count and form, generators, callbacks and lists of prompts.

A pipeline in memory accepts them as in diffusers. For a model that Everyframe loads, and where
Everyframe has its own option instead, they are refused with a message that names that option.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.limits import MAX_SEED
from everyframe.core.options import shown
from everyframe.core.request import Request

#: The `output_type` that returns latents instead of frames.
LATENTS = "latent"
#: Output types that return the pipeline's own output; ``np`` becomes a `Video`.
_OWN_FORMS = ("pt", "pil", LATENTS)
NUMBERS = ("num_videos_per_prompt", "num_images_per_prompt")
PROMPTS = ("prompt", "negative_prompt")
#: First words of parameters that take the place of a prompt: what one text encoder makes of it, or
#: two (Kandinsky 5), or LTX-2's connectors.
_ENCODED = ("prompt_embeds", "connector_video_embeds")
#: Everyframe's replacement for each argument of diffusers, as the end of a message.
_INSTEAD: Mapping[str, str] = {
    "generator": "seed=7 seeds the noise",
    "output_type": 'output="float" gives frames as float32',
    "return_dict": "what comes back is a Video, and its frames are video.frames",
    **dict.fromkeys(NUMBERS, "num_videos=2 makes videos of seed and seed + 1"),
    **dict.fromkeys(
        ("callback", "callback_steps", "callback_on_step_end",
         "callback_on_step_end_tensor_inputs"),
        "everyframe.stream gives an event for each step",
    ),
    "output": "frames and sound come back",
    **dict.fromkeys(PROMPTS, "each prompt is a text of a request of its own"),
}  # fmt: skip
#: How a record names a generator that stands in a list again: the place where it stands first.
_SAME = "same_as"
#: Arguments that control the call and not the content of the video.
NAMES = frozenset(_INSTEAD).difference(PROMPTS)


def refused(name: str) -> InputError:
    """Error for a call option that a model loaded by Everyframe does not accept."""
    instead = _INSTEAD[name]
    return InputError(
        f"option {name} is for a pipeline in memory, which everyframe.run takes; here {instead}"
    )


def hint(name: str) -> str:
    """The replacement for a call option that an in-memory pipeline lacks; empty for other names."""
    return f"; {_INSTEAD[name]}" if name in NAMES else ""


def is_call_option(name: str, value: Any) -> bool:
    """Whether it is a call option, or prompts in another form than one text."""
    return name in NAMES or is_prompts(name, value)


def is_prompts(name: str, value: Any) -> bool:
    """Whether it is a prompt in another form than one text."""
    return name in PROMPTS and value is not None and not isinstance(value, str)


def has_encoded_prompt(own: Mapping[str, Any]) -> bool:
    """Whether the pipeline's own parameters hold an encoded prompt in place of text."""
    return any(name.startswith(_ENCODED) and value is not None for name, value in own.items())


def without_overridden(asked: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A record's request without the overridden names; `seed` and `generator` go together."""
    names = {*names, *(("seed",) if "generator" in names else ())}
    names |= {"generator"} if "seed" in names else set()
    left = {name: value for name, value in asked.items() if name not in names}
    option = left.pop("option", None)
    if isinstance(option, Mapping):
        option = {name: value for name, value in option.items() if name not in names}
    return {**left, "option": option} if option else left


def check(name: str, value: Any) -> None:
    """Raise `InputError` for a value that an in-memory pipeline does not accept."""
    if name == "output":
        raise InputError(f"option output is set by everyframe itself: {_INSTEAD[name]}")
    if isinstance(value, str) and value.startswith("<"):  # so a record names an object
        raise InputError(f"the video was made with a {name} given in Python; give it again")
    is_right, allowed = _rule(name)
    if value is not None and not is_right(value):
        raise InputError(f"{name} must be {allowed}, got {shown(value)}")


def _rule(name: str) -> tuple[Callable[[Any], bool], str]:
    """The predicate for a value of this option, and the allowed values in words."""
    if name in PROMPTS:
        return _are_prompts, "text, a list of texts, or texts by the number of their frame"
    if name in NUMBERS:
        return lambda given: type(given) is int and given > 0, "a whole number from 1"
    if name == "generator":
        return _are_generators, "a torch.Generator or a list of them"
    if name == "output_type":
        forms = ("np", *_OWN_FORMS)
        return lambda given: given in forms, f"one of {', '.join(forms)}"
    if name == "return_dict":
        return lambda given: given is True, f"True; {_INSTEAD[name]}"
    if name in ("callback", "callback_on_step_end"):
        return callable, "something to call at each step"
    return lambda given: True, ""


def _are_prompts(given: Any) -> bool:
    if isinstance(given, Mapping):
        are_frames = all(str(key).isdecimal() for key in given)
        return bool(given) and are_frames and all(isinstance(each, str) for each in given.values())
    is_list = isinstance(given, list) and bool(given)
    return is_list and all(isinstance(each, str) for each in given)


def _are_generators(given: Any) -> bool:
    import torch

    listed = _as_list(given)
    return bool(listed) and all(
        isinstance(each, torch.Generator)
        or (isinstance(each, Mapping) and each.keys() == {"seed", "device"})
        or _place_of_same(each) in range(number)
        for number, each in enumerate(listed)
    )


def _place_of_same(recorded: Any) -> int | None:
    """Place of the generator that stands in a list before, and is in this place of it too."""
    is_same = isinstance(recorded, Mapping) and recorded.keys() == {_SAME}
    place = recorded[_SAME] if is_same else None
    return place if type(place) is int else None


def wants_output(own: Mapping[str, Any]) -> bool:
    """Whether the pipeline's own output is requested, in a form that `Video` does not have."""
    return own.get("output_type") in _OWN_FORMS


def gives_list(own: Mapping[str, Any]) -> bool:
    """Whether the call returns a list of videos, even a list of one."""
    return isinstance(own.get("prompt"), list) or any((own.get(name) or 1) > 1 for name in NUMBERS)


def text_of(prompts: Any) -> str | None:
    """All texts of a prompt in any form, joined with "; "."""
    if prompts is None or isinstance(prompts, str):
        return prompts
    return "; ".join(prompts.values() if isinstance(prompts, Mapping) else prompts)


def call_values(own: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the pipeline's own parameters from record form to call form.

    Call options that are None are left out, frame numbers of prompts (strings in a record) become
    ints, and recorded seeds become generators.
    """
    found = {name: value for name, value in own.items() if name not in NAMES or value is not None}
    for name in PROMPTS:
        if isinstance(found.get(name), Mapping):
            found[name] = {int(key): text for key, text in found[name].items()}
    given = found.get("generator")
    if given is not None:
        found["generator"] = _generators(given) if isinstance(given, list) else _generator(given)
    return found


def _generators(given: list[Any]) -> list[Any]:
    made: list[Any] = []
    for each in given:
        place = _place_of_same(each)
        made.append(_generator(each) if place is None else made[place])
    return made


def _generator(generator: Any) -> Any:
    import torch

    if not isinstance(generator, Mapping):
        return generator
    try:
        return torch.Generator(generator["device"]).manual_seed(generator["seed"])
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise InputError(
            f"the generator that the video was made with, {shown(dict(generator))}, can't be made "
            f"here ({why}); give generator= again"
        ) from None


def states_of(own: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The generators passed to the call, each with its current state."""
    given = own.get("generator")
    return [] if given is None else [(each, each.get_state()) for each in _as_list(given)]


def with_seeds(option: Mapping[str, Any]) -> dict[str, Any]:
    """Replace generators that have not drawn since seeding by their seeds and devices.

    This makes a run reproducible from its record. A generator in any other state stays as it is.
    One that stands in a list again, as in ``[generator] * 2``, is named by its place: each video
    goes on with its numbers.
    """
    given, found = option.get("generator"), dict(option)
    if given is not None and _are_generators(given) and all(map(_is_fresh, _as_list(given))):
        found["generator"] = _seeds_of(given) if isinstance(given, list) else _seed_of(given)
    return found


def _seeds_of(given: list[Any]) -> list[Any]:
    places: dict[int, int] = {}
    for number, each in enumerate(given):
        places.setdefault(id(each), number)
    return [
        _seed_of(each) if (place := places[id(each)]) == number else {_SAME: place}
        for number, each in enumerate(given)
    ]


def with_generator_seeds(request: Request, option: Mapping[str, Any], *, has_seed: bool) -> Request:
    """The request with generators replaced by seeds (see `with_seeds`).

    `has_seed`: the pipeline has a seed parameter beside its generator, and does without a generator
    where it gets a seed.

    Raises:
        InputError: a seed, or several videos, beside a generator.
    """
    given = option.get("generator")
    if given is None or not _are_generators(given) or isinstance(_as_list(given)[0], Mapping):
        return request
    if request.seed is not None:
        raise InputError(f"seed={request.seed} and generator both say what is drawn; give one")
    if request.num_videos > 1:
        raise InputError(
            "num_videos makes videos of seed, seed + 1, and so on; with a generator give "
            "num_videos_per_prompt"
        )
    first, found = _as_list(given)[0].initial_seed(), with_seeds(option)
    is_ours = found["generator"] == {"seed": first, "device": "cpu"} and first <= MAX_SEED
    if is_ours and not has_seed:
        del found["generator"]
    families = {**request.family_options, "option": found}
    seed = first % (MAX_SEED + 1)
    return Request(**{**request.given(), "seed": seed, "family_options": families})


def notes(option: Mapping[str, Any]) -> tuple[str, ...]:
    """Note for the user if a generator has drawn before, so the video can't be made again."""
    given = option.get("generator")
    if given is None or all(map(_is_fresh, _as_list(given))):
        return ()
    return (
        "the generator that was given has drawn before, so no seed stands for it: the video can't "
        "be made again from its record",
    )


def _as_list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _seed_of(generator: Any) -> Any:
    if isinstance(generator, Mapping):
        return generator
    return {"seed": generator.initial_seed(), "device": str(generator.device)}


def _is_fresh(generator: Any) -> bool:
    import torch

    if isinstance(generator, Mapping):
        return True
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(fresh.get_state(), generator.get_state())
