"""What a model does: its feeds, its answers, what goes into its layers, and the time it takes."""
