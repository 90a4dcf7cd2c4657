"""Options of the passes that change layers, and the plan of a run, which follows from the options."""
