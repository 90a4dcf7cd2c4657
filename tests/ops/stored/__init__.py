"""Stored outputs of the operators for fixed inputs, and the comparison of a build with them.

Each case is a one-node model, run by stock ONNX Runtime with the registered library. Inputs and weights are not stored,
because an integer random generator reproduces them. `answers.json` holds a hash of each output for each instruction
set; `samples.npz` holds some of its values. `python -m tests.ops.stored --help` explains how to add outputs.
"""
