"""What callers of diffusers give a call besides what is seen: how many videos, in which form, drawn
by which generator, watched by which callback.

A pipeline in memory takes them as in diffusers. Where Everyframe has a way of its own instead, and
for a model that it loads itself, they are refused in a line that names that.
Not here: the pipeline's other parameters (`settings.py`). Read next: `call_arguments.py`,
`loaded_pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.request import MAX_SEED, Request

#: The form of output that is no frames.
LATENTS = "latent"
#: Forms in which the pipeline's own output is wanted; ``np`` is that of a `Video`.
_OWN_FORMS = ("pt", "pil", LATENTS)
NUMBERS = ("num_videos_per_prompt", "num_images_per_prompt")
PROMPTS = ("prompt", "negative_prompt")
#: What stands here for each of diffusers' arguments.
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
#: Those that say how a pipeline is called, and not what the video shows.
NAMES = frozenset(_INSTEAD).difference(PROMPTS)


def refused(name: str) -> InputError:
    """Why a model that is loaded here takes no such argument."""
    instead = _INSTEAD[name]
    return InputError(
        f"option {name} is for a pipeline in memory, which everyframe.run takes; here {instead}"
    )


def hint(name: str) -> str:
    """What stands for an argument that a pipeline in memory lacks; empty for any other name."""
    return f"; {_INSTEAD[name]}" if name in NAMES else ""


def is_call_option(name: str, value: Any) -> bool:
    """Whether a pipeline in memory is given it so: one of these, or prompts that are no text."""
    return name in NAMES or is_prompts(name, value)


def is_prompts(name: str, value: Any) -> bool:
    """Whether it is prompts in another form than one text."""
    return name in PROMPTS and value is not None and not isinstance(value, str)


def without_overridden(asked: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What a record asks for, but for what is given anew: those names, and what says the same."""
    names = {*names, *(("seed",) if "generator" in names else ())}
    names |= {"generator"} if "seed" in names else set()
    left = {name: value for name, value in asked.items() if name not in names}
    option = left.pop("option", None)
    if isinstance(option, Mapping):
        option = {name: value for name, value in option.items() if name not in names}
    return {**left, "option": option} if option else left


def check(name: str, value: Any) -> None:
    """Raise `InputError` for a value that a pipeline in memory can't be given."""
    if name == "output":
        raise InputError(f"option output is set by everyframe itself: {_INSTEAD[name]}")
    if isinstance(value, str) and value.startswith("<"):  # so a record names an object
        raise InputError(f"the video was made with a {name} given in Python; give it again")
    is_right, allowed = _rule(name)
    if value is not None and not is_right(value):
        raise InputError(f"{name} must be {allowed}, got {value!r}")


def _rule(name: str) -> tuple[Callable[[Any], bool], str]:
    """What a value must hold to, and that in words."""
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

    listed = _listed(given)
    return bool(listed) and all(
        isinstance(each, torch.Generator)
        or (isinstance(each, Mapping) and each.keys() == {"seed", "device"})
        for each in listed
    )


def wants_output(own: Mapping[str, Any]) -> bool:
    """Whether the pipeline's output is wanted as it is, in a form that no `Video` has."""
    return own.get("output_type") in _OWN_FORMS


def gives_list(own: Mapping[str, Any]) -> bool:
    """Whether a call is asked for a list of videos, be it of one."""
    return isinstance(own.get("prompt"), list) or any((own.get(name) or 1) > 1 for name in NUMBERS)


def text_of(prompts: Any) -> str | None:
    """All texts of prompts in any form, in one."""
    if prompts is None or isinstance(prompts, str):
        return prompts
    return "; ".join(prompts.values() if isinstance(prompts, Mapping) else prompts)


def call_values(own: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's own parameters as its call gets them.

    Nothing in the place of None, numbers for the frames of prompts, which are words in a record,
    and generators for the seeds that stand for them.
    """
    found = {name: value for name, value in own.items() if name not in NAMES or value is not None}
    for name in PROMPTS:
        if isinstance(found.get(name), Mapping):
            found[name] = {int(key): text for key, text in found[name].items()}
    given = found.get("generator")
    if given is not None:
        found["generator"] = list(map(_made, given)) if isinstance(given, list) else _made(given)
    return found


def _made(generator: Any) -> Any:
    import torch

    if not isinstance(generator, Mapping):
        return generator
    return torch.Generator(generator["device"]).manual_seed(generator["seed"])


def states_of(own: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The generators that are handed on, each with its state."""
    given = own.get("generator")
    return [] if given is None else [(each, each.get_state()) for each in _listed(given)]


def with_seeds(option: Mapping[str, Any]) -> dict[str, Any]:
    """The same with seeds in the place of generators that drew nothing since they were seeded.

    So a run with them can be kept and made again; nothing stands for one in another state.
    """
    given, found = option.get("generator"), dict(option)
    if given is not None and _are_generators(given) and all(map(_is_fresh, _listed(given))):
        found["generator"] = (
            list(map(_seed_of, given)) if isinstance(given, list) else _seed_of(given)
        )
    return found


def with_generator_seeds(request: Request, option: Mapping[str, Any], *, has_seed: bool) -> Request:
    """The request with seeds in the place of its generators; see `with_seeds`.

    `has_seed` is of a pipeline that takes a seed beside its generator, and goes without it where it
    is given one.
    """
    given = option.get("generator")
    if given is None or not _are_generators(given) or isinstance(_listed(given)[0], Mapping):
        return request
    if request.seed is not None:
        raise InputError(f"seed={request.seed} and generator both say what is drawn; give one")
    if request.num_videos > 1:
        raise InputError(
            "num_videos makes videos of seed, seed + 1, and so on; with a generator give "
            "num_videos_per_prompt"
        )
    first, found = _listed(given)[0].initial_seed(), with_seeds(option)
    is_ours = found["generator"] == {"seed": first, "device": "cpu"} and first <= MAX_SEED
    if is_ours and not has_seed:
        del found["generator"]
    families = {**request.family_options, "option": found}
    seed = first % (MAX_SEED + 1)
    return Request(**{**request.given(), "seed": seed, "family_options": families})


def notes(option: Mapping[str, Any]) -> tuple[str, ...]:
    """What a person should know of them."""
    given = option.get("generator")
    if given is None or all(map(_is_fresh, _listed(given))):
        return ()
    return (
        "the generator that was given has drawn before, so no seed stands for it: the video can't "
        "be made again from its record",
    )


def _listed(given: Any) -> list[Any]:
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
