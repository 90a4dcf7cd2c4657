"""Pass verify: compare the optimized model with the original before it is saved."""
