"""The rewriting of models: passes, the recipes that order them, and the report of what they did."""
