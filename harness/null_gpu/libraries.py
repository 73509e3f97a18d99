"""Build the null GPU's CUDA libraries for the packages that need them.

    python -m harness.null_gpu.libraries SITE-PACKAGES

Each library has the functions of this folder's C files, and stubs that return 0 for all other functions
that the extensions in SITE-PACKAGES import from it. The libraries replace NVIDIA's in nvidia/cu13/lib, where
torch looks for them. The headers come from Triton's wheel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARIES: dict[str, tuple[str, str]] = {  # name -> pattern of its functions, source file
    "libcudart.so.13": ("_*cuda[A-Z]", "runtime.c"),
    "libcuda.so.1": ("cu(?!File)[A-Z]", "driver.c"),
    "libnvidia-ml.so.1": ("nvml", "nvml.c"),
    "libcublas.so.13": ("cublas(?!Lt)", "blas.c"),
    "libcublasLt.so.13": ("cublasLt", "blas.c"),
    "libcudnn.so.9": ("cudnn", ""),
    "libcufft.so.12": ("cufft", ""),
    "libcufile.so.0": ("cuFile", ""),
    "libcupti.so.13": ("cupti", ""),
    "libcurand.so.10": ("curand", ""),
    "libcusolver.so.12": ("cusolver", ""),
    "libcusparse.so.12": ("cusparse(?!Lt)", ""),
    "libcusparseLt.so.0": ("cusparseLt", ""),
    "libnccl.so.2": ("p?nccl", ""),
    "libnvrtc.so.13": ("nvrtc", ""),
    "libnvshmem_host.so.3": ("nvshmem", ""),
}
EXTENSIONS = ("torch/lib/*.so", "vllm/**/*.so", "nixl_cu13*/**/*.so*", ".nixl_cu13*/**/*.so*")


def folder(packages: Path) -> Path:
    return packages / "nvidia" / "cu13" / "lib"


def owns(pattern: str, name: str) -> bool:
    """Return whether a function belongs to the library with this pattern."""
    return re.match(pattern, name) is not None


def build(packages: Path) -> None:
    """Build all libraries for the packages in this folder."""
    wanted = _undefined(file for pattern in EXTENSIONS for file in packages.glob(pattern))
    # Triton compiles its extension on first use.
    for file in packages.glob("triton/backends/nvidia/*.c"):
        wanted |= dict.fromkeys(re.findall(r"\b(cu[A-Z]\w+)\(", file.read_text()), "")
    target = folder(packages)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, (pattern, source) in LIBRARIES.items():
            taken = {one: version for one, version in wanted.items() if owns(pattern, one)}
            own = _compile(source, packages, Path(scratch) / "own.o") if source else set()
            stubs = sorted(taken.keys() - own)
            text = "".join(f"long {one}(void) {{ return 0; }}\n" for one in stubs)
            (Path(scratch) / "stubs.c").write_text(text)
            parts = [f"{scratch}/stubs.c", *([f"{scratch}/own.o"] if source else [])]
            if version := next(filter(None, taken.values()), ""):
                (Path(scratch) / "versions").write_text(f"{version} {{ global: *; }};\n")
                parts.append(f"-Wl,--version-script={scratch}/versions")
            _gcc("-shared", f"-Wl,-soname,{name}", *parts, "-o", target / name, "-ldl", "-lpthread")
    print(f"null GPU: {len(LIBRARIES)} libraries in {target}")


def _undefined(files: Iterable[Path]) -> dict[str, str]:
    """Return the symbols that these files import, each with its version or ""."""
    found: dict[str, str] = {}
    for file in files:
        for line in _nm("--undefined-only", "--with-symbol-versions", file):
            name, _, version = line.split()[-1].partition("@")
            found[name] = version.lstrip("@") or found.get(name, "")
    return found


def _compile(source: str, packages: Path, target: Path) -> set[str]:
    """Compile a file of this folder and return the functions that it defines."""
    headers = packages / "triton" / "backends" / "nvidia" / "include"
    _gcc("-c", SOURCES / source, "-o", target, f"-I{headers}")
    return {line.split()[-1] for line in _nm("--defined-only", "--extern-only", target, dynamic=False)}


def _nm(*arguments: object, dynamic: bool = True) -> list[str]:
    line = ["nm", *(["-D"] if dynamic else []), *map(str, arguments)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.splitlines()


def _gcc(*arguments: object) -> None:
    flags = ("-O1", "-fPIC", "-fno-builtin", "-Wall", "-Werror", "-Wno-unused-parameter")
    subprocess.run(["gcc", *flags, *map(str, arguments)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
