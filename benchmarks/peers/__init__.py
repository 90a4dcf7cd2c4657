"""Ortolan beside other runtimes, in one run: python -m ortolan.benchmarks.peers

Modules: environments (a peer's own packages) · candidate (a form of a model in a process) · result (what was measured, its file)
· verdict (ratios at equal quality, goals, what changed).
"""
