"""Run README.md's Python example with an installed wheel on a small model: try_wheel.py README.md [ISA]

Run it in an empty folder, in an environment with only the wheel and its dependencies. ISA is the best feature set that
the wheel is expected to detect.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import onnx_ir as ir

import ortolan
from ortolan import doctor
from ortolan.models import tiny


def main(readme: Path, isa: str | None) -> None:
    """Check the installation, then run the example."""
    try:
        from ortolan import _testing  # noqa: F401
    except ImportError:
        pass
    else:
        raise AssertionError("this is a test build")
    assert Path.cwd() not in Path(ortolan.__file__).parents, ortolan.__file__
    found = ortolan.cpu_info()["isa"]
    assert isa in (None, found), f"the CPU has {found}, expected {isa}"
    check = doctor.check_cpu()
    print(f"{check.status}: {check.detail}")
    doctor.run_tiny_model(ortolan.get_library_path())
    # The vocabulary must cover the token ids in README.md.
    ir.save(tiny.tiny_bert(hidden_size=128, intermediate_size=256, vocab_size=8000), "model.onnx")
    (code,) = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(readme), "exec"), names)
    print(getattr(names["vectors"], "shape", None))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else None)
