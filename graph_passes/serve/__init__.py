"""The form of decoders for serving: tokens of many sequences in one call, keys and values in pools of blocks."""
