"""The passes that a recipe may name, and what they share (context.py). One file a pass."""
