"""Any diffusers video pipeline, run through its own `__call__`. Read next:
`diffusers_pipelines/family.py`.
"""
