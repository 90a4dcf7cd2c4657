"""Stored answers of the operators to fixed inputs, and the comparison of a build with them.

Each case is a model of one node, run by stock ONNX Runtime with the registered library. Inputs and weights come from a
generator of integers, so they are not stored. `answers.json` holds a hash of each output for each instruction set,
`samples.npz` some of its values. `python -m tests.ops.stored --help` explains how the answers are made.
"""
