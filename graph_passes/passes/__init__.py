"""The passes that a recipe can name, and the state they share (context.py)."""
