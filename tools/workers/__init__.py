"""Worker processes that run models for benchmarks, each with its own interpreter, controlled by lines of JSON.

process.py is the client. serve.py is the server: it runs in any Python of 3.11 or later without packages, and loads a
script by its path: encoders.py, decoders.py, layers.py or against/worker.py.
"""
