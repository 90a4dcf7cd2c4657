"""Passes that replace attention by NoMADAttention."""
