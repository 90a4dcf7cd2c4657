"""An OpenAI-compatible server: chat, completions, embeddings and reranking in one process.

`serve` (run.py) opens the models and runs the application. The modules below it know the engine's public API only.
Imports wait until they are needed, because this package needs the extra `serve`.
"""

from __future__ import annotations
