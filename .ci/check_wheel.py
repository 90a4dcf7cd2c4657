"""Checks that wheels hold the operator library and nothing of test builds: check_wheel.py WHEEL ..."""

from __future__ import annotations

import sys
import zipfile

_NEEDED = ("ortolan/libortolan_ops.so", "ortolan/libortolan_opencl.so", "ortolan/_native.")
_FOREIGN_NAME = "ortolan/_testing"
_FOREIGN_TEXT = b"ORTOLAN_ASSUME_"


def problems(wheel: str) -> list[str]:
    """What is wrong with the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [f"{need} is missing" for need in _NEEDED if not any(name.startswith(need) for name in names)]
        found += [f"{name} is of test builds" for name in names if name.startswith(_FOREIGN_NAME)]
        for name in names:
            if ".so" in name and _FOREIGN_TEXT in archive.read(name):
                found.append(f"{name} knows {_FOREIGN_TEXT.decode()}, which is of test builds")
    return found


if __name__ == "__main__":
    all_problems = [f"{wheel}: {problem}" for wheel in sys.argv[1:] for problem in problems(wheel)]
    print("\n".join(all_problems) or "nothing of test builds in " + " ".join(sys.argv[1:]))
    sys.exit(1 if all_problems else 0)
