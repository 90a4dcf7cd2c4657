"""Running models: feeds (inputs by name), answers (the outputs of a run), inputs of layers, and times."""
