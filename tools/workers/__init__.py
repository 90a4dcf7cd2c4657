"""Processes that run models for benchmarks, each in an environment of its own, told what to do by lines of JSON.

process.py is the side that asks. serve.py is the side that answers; it runs in any Python of 3.11 or later and needs no
package. What can be asked for lies in a script, loaded by its path: encoders.py, or against/worker.py.
"""
