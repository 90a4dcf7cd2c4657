"""Texts as inputs of models: tokenizers, in Python and as graphs."""
