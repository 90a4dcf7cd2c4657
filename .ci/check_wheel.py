"""Check the contents of wheels and the dependencies of their libraries, and print their sizes: check_wheel.py WHEEL ...

A wheel holds the operator library, but no test code and no developer tools (tools/). Its libraries need only libraries
of glibc and gcc, such as libm and libstdc++. In a manylinux wheel, they use no glibc symbol newer than the wheel's name
allows. The operator library exports only the functions that hosts call. `readelf` (binutils) reads libraries for any
CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_NEEDED = ("ortolan/libortolan_ops.so", "ortolan/libortolan_opencl.so", "ortolan/_native.")
_FOREIGN_NAME = "ortolan/_testing"
_INSTALLED = re.compile(r"ortolan/|optimum/commands/register/|ortolan-[^/]+\.dist-info/")
_FOREIGN_TEXT = b"ORTOLAN_ASSUME_"
_LIBRARIES = re.compile(r"lib(c|m|pthread|dl|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-.+\.so\.\d+")
_SHOWN = {
    "libortolan_ops.so": {"RegisterCustomOps", "CreateEpFactories", "ReleaseEpFactory"},
    "libortolan_opencl.so": {"OrtolanGetOpenCl"},
}
_MANYLINUX = re.compile(r"manylinux_2_(\d+)_")


def problems(wheel: str) -> list[str]:
    """Return the wheel's defects as messages."""
    # A wheel's name may have several manylinux tags; the newest glibc of them is the limit.
    manylinux = max(map(int, _MANYLINUX.findall(Path(wheel).name)), default=None)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [f"{need} is missing" for need in _NEEDED if not any(name.startswith(need) for name in names)]
        found += [f"{name} belongs to test builds" for name in names if name.startswith(_FOREIGN_NAME)]
        found += [f"{name} is outside the package" for name in names if not _INSTALLED.match(name)]
        for name in names:
            if ".so" not in name:
                continue
            content = archive.read(name)
            if _FOREIGN_TEXT in content:
                found.append(f"{name} contains {_FOREIGN_TEXT.decode()}, which only test builds may")
            with tempfile.TemporaryDirectory() as folder:
                library = Path(folder) / Path(name).name
                library.write_bytes(content)
                found += [f"{name} {problem}" for problem in library_problems(library, manylinux)]
    return found


def library_problems(library: Path, glibc: int | None) -> list[str]:
    """Return forbidden dependencies and exports of an ELF library. glibc: latest allowed minor version; None: any."""
    found = []
    for needed in re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", library)):
        if not _LIBRARIES.fullmatch(needed):
            found.append(f"needs {needed}")
    shown = set()
    for line in _readelf("--dyn-syms", library).splitlines():
        fields = line.split()  # number, value, size, type, binding, visibility, section, name@version
        if len(fields) < 8 or fields[4] not in ("GLOBAL", "WEAK"):
            continue
        section, symbol = fields[6], fields[7]
        version = re.search(r"@GLIBC_2\.(\d+)", symbol)
        if glibc is not None and section == "UND" and version and int(version[1]) > glibc:
            found.append(f"needs {symbol}, which is newer than glibc 2.{glibc}")
        if section not in ("UND", "ABS"):
            shown.add(symbol.partition("@")[0])
    expected = _SHOWN.get(library.name, shown)
    if shown - expected:
        found.append(f"exports {', '.join(sorted(shown - expected))}, expected only {', '.join(sorted(expected))}")
    return found


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def sizes(wheel: str) -> str:
    """Return one line with the sizes of the wheel and its libraries in MiB."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(Path(wheel).name, Path(wheel).stat().st_size)]
        files += [(Path(info.filename).name, info.file_size) for info in archive.infolist() if ".so" in info.filename]
    return ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in files)


def main(wheels: list[str]) -> int:
    """Check each wheel; return 1 if one has a defect."""
    found = [f"{wheel}: {problem}" for wheel in wheels for problem in problems(wheel)]
    print("\n".join(found or [sizes(wheel) for wheel in wheels]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
