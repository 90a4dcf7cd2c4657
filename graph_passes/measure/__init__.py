"""Runs models: feeds (inputs by name), answers (outputs of a run), recorded inputs of layers, and times."""
