"""Compare Ortolan with other runtimes in one run, with python -m tools.peers.

encoders, sparse_encoders, decoders, layers    the sections: models, configurations and kinds of work
comparison       the measurement of a section
configuration    a model in one runtime and format, run by a process
environments     the virtual environment of each runtime
result           the measurements, and their file
verdict          ratios at equal quality
page, pictures, site, names    Markdown pages and pictures
"""
