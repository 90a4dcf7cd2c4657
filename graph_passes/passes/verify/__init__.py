"""The pass verify: the optimized model is compared with the original before it is saved."""
