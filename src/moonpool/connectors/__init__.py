"""Other engines' way into the pool, each loaded by its engine in that engine's processes.

Nothing here imports an engine but the module of its name.
"""
