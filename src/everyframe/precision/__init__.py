"""Precision: dtype of each component, float32 islands, casts at module edges; no autocast.

`policy` chooses dtypes from device facts, `islands` names the modules that stay in float32,
`cast_hooks` applies the choice to a plain module from outside, `upcast` widens a module as a
repair, `quantization` stores weights in eight bits, and `dtypes` maps names and sizes. Planning
imports only the modules without torch: `policy`, `islands`, `dtypes`. Read next:
`everyframe.core.plan.Precision`.
"""
