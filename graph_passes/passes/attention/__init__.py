"""Passes that replace attention with NoMADAttention."""
