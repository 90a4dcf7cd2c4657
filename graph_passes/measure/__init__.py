"""Running models: feeds, answers, layer inputs and times."""
