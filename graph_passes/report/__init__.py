"""What a run did to a model, for people and for programs."""
