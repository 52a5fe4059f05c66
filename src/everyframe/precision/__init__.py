"""Precision by construction: which dtype each part of a model has, and casts at module edges.

No autocast. `policy` chooses by the device's facts, `islands` says which names stay in float32,
`edges` puts a choice on a plain module from outside, `dtypes` knows names and sizes. Only `edges`
imports torch, so planning can ask everything else. Read next: `everyframe.core.plan.Precision`.
"""
