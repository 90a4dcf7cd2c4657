"""The source checkout, for tests that run ``python -m tools.…`` from another folder."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATHS = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(_PATHS)}
