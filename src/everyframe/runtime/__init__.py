"""What a component needs while it runs: loading, guard, repairs, memory fallbacks, offload.

Read next: `interface.py` (what the engine asks of a family), `loading.py`, `stages/templates.py`.
"""
