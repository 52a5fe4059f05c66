"""Samplers: generators over ``denoise(x, t)``, one file for each sampler.

A sampler knows nothing of guidance, models, devices or seeds: the denoiser contains the first
three, and noise comes from a callable. It yields one `Step` per step with the state after it, so a
run can be watched, saved and resumed at any step (``start``). The state is float32 at least; a
float64 state stays float64.

Read next: `rectified_flow` (Open-Sora 1.2), `iddpm` (Open-Sora 1.0), `flow_matching` (Step-Video),
`euler_karras` (Stable Video Diffusion), `diffusers_scheduler` (any diffusers scheduler); `guidance`
and `noise` for the callers.
"""
