"""Install each runtime in a virtual environment of its own, so that versions of numpy or torch do not clash.

    python = make_environment("openvino", print)

Environments are in the cache folder, made by venv and pip on first use and again when requirements change. pip uses its
configured indices, so a CPU build of torch is installed if one of them has it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ortolan.cache_folder import default_cache_dir
from ortolan.errors import OrtolanError

_TORCH, _TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"

_CLANGS = ("clang-16", "clang", *(f"clang-{version}" for version in range(22, 16, -1)))
_MAY_HAVE_AMX = sys.platform == "linux" and platform.machine() == "x86_64"

# Maps an engine to its packages. Versions are pinned, because results of different versions are not comparable.
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "openvino": ("openvino==2026.4.1", "nncf==3.4.0"),
    "openvino-genai": ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "openvino==2026.4.1"),
    "ctranslate2": ("ctranslate2==4.8.5", _TRANSFORMERS, _TORCH),
    "torch": (_TORCH, _TRANSFORMERS),
    "sentence-transformers": ("sentence-transformers==6.2.0", _TORCH),
    "fastembed": ("fastembed==0.9.1",),
    "infinity": ("infinity-emb[torch,optimum]==0.0.78", "optimum==2.1.0", "transformers==4.57.6", _TORCH),
    "embed-anything": ("embed-anything==0.7.1", "numpy"),
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "ik_llama.cpp": ("ik-llama-cpp-python==0.1.5",),
    "onnxruntime-genai": ("onnxruntime-genai==0.18.0",),
    "mistralrs": ("mistralrs==0.9.5", "numpy"),
    "deepsparse": ("deepsparse==1.8.0",),
}
# Runtimes whose licenses allow only evaluation; they run only if --peer names them.
ASKED_FOR = ("deepsparse",)
# Packages that pip compiles here, for this CPU, and variables for that. llama.cpp's vision library (LLAVA) is not
# needed, nor are ik_llama.cpp's attention kernels for caches of 4 bits. The wheels of ik_llama.cpp use AVX2 only.
_COMPILED: Mapping[str, Mapping[str, str]] = {
    "llama.cpp": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"},
    "ik_llama.cpp": {
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF",
        "PIP_NO_BINARY": "ik-llama-cpp-python",
    },
}
_MADE = ".made"


def _variables(peer: str) -> Mapping[str, str]:
    """Return environment variables for packages that pip compiles here.

    llama.cpp is compiled by clang if it is installed (packages clang-16 and libomp-16-dev of Debian): GCC 12 to 15
    remove ggml's stores to memory that only AMX instructions read, such as the tile configuration, so dead store
    elimination is off with GCC. ik_llama.cpp has no AMX instructions, and clang 16 crashes on its bf16 code, so the
    default compiler compiles it.
    """
    variables = dict(_COMPILED.get(peer, {}))
    if peer != "llama.cpp":
        return variables
    if clang := next(filter(shutil.which, _CLANGS), None):
        return variables | {"CC": clang, "CXX": clang.replace("clang", "clang++")}
    return variables | ({"CXXFLAGS": "-fno-tree-dse -fno-dse"} if _MAY_HAVE_AMX else {})


def environment_folder(peer: str) -> Path:
    """Return the folder of a runtime's environment; it depends on the requirements and on Python's version."""
    variables = (f"{name}={value}" for name, value in _variables(peer).items())
    text = "\n".join((*REQUIREMENTS[peer], *variables, sys.version))
    return default_cache_dir() / "peers" / f"{peer}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def make_environment(peer: str, say: Callable[[str], None]) -> str:
    """Return the interpreter of a runtime's environment; install the environment first if it is missing.

    Raises:
        OrtolanError: pip cannot install it. The message has pip's first error line.
    """
    folder = environment_folder(peer)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if (folder / _MADE).is_file():
        return str(python)
    say(f"installing {', '.join(REQUIREMENTS[peer])}; once")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], peer)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    variables = _variables(peer)
    # pip's cache may have wheels that were compiled with other variables.
    _run([*pip, *(["--no-cache-dir"] if variables else []), *REQUIREMENTS[peer]], peer, variables)
    (folder / _MADE).touch()
    return str(python)


def _run(command: list[str], peer: str, variables: Mapping[str, str] | None = None) -> None:
    environment = os.environ | dict(variables or {})
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=environment
        )
    except OSError as error:
        raise OrtolanError(f"cannot start {command[0]}: {error.strerror}") from None
    if done.returncode != 0:
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "ERROR" in line or "error" in line]
        raise OrtolanError(
            f"{peer} cannot be installed: {errors[0].strip() if errors else f'pip ended with {done.returncode}'}"
        )
