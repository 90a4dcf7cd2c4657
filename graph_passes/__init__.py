"""Model rewriting: passes, the recipes that order them, and the report of the result."""
