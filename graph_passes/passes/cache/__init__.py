"""Passes for KV caches: compressed caches and cached prompts."""
