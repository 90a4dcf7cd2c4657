"""Commands that developers run from a source checkout; they are not part of the package.

``python -m tools.peers``               compare Ortolan with other runtimes
``python -m tools.against REVISION``    compare kernels with those of another revision
``python -m tools.evaluate``            score decoders: cross-entropy and perplexity
``python -m tools.evaluate_prompt``     score decoders after a pruned prompt
``python -m tools.evaluate_pruning``    score pruning methods
``tools.workers``                       the processes that ``peers`` and ``against`` time
"""
