"""The options of the passes that change layers, and the plan of a run made from them before any pass runs."""
