"""Samplers: functions over ``denoise(x, t)``, one file a sampler.

A sampler knows nothing of guidance, models, devices or seeds: the denoiser that it is given has all
of that inside, and noise comes from a callable. It is a generator of `Step`s, each the state after
one step, so that a run can be watched, saved, and gone on with from any step (``start``). The state
is float32 at least and stays float64 where that is given.

Read next: `rflow` (Open-Sora 1.2), `iddpm` (Open-Sora 1.0), `euler_karras` (Stable Video
Diffusion), `guidance` and `noise` for the callers.
"""
