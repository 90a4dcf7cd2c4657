"""Ortolan beside other runtimes, in one run: python -m tools.peers

Modules: encoders, sparse_encoders, decoders, layers (what is compared: each a section) · comparison (the way of every
section) · configuration (a form of a model in a process) · environments (a peer's packages) · result (what was measured) ·
verdict (ratios at equal quality) · page, pictures.
"""
