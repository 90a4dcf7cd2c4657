"""The operators' answers to fixed inputs, stored, and what compares a build with them.

Each case is a model of one node, run by stock ONNX Runtime with the registered library. Inputs and weights come from a
generator of integers, so they are not stored; `answers.json` holds a hash of each output for each instruction set,
`samples.npz` some of its numbers. `python -m tests.ops.stored --help` says how the set is made.
"""
