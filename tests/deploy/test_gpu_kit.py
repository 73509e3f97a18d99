import re
import struct
import subprocess

from packaging.utils import canonicalize_name

from deploy.gpu_kit.__main__ import HERE, pins
from deploy.gpu_kit.cut import cut

HEAD = 16  # bytes
CODE, PTX = 2, 1


def entry(kind, architecture, payload):
    head = struct.pack("<HHIQ", kind, 0, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return head.ljust(64, b"\0") + payload


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, HEAD, len(body)) + body


def extension(folder, *containers):
    (folder / "fatbin").write_bytes(b"".join(containers))
    source = f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{folder / "fatbin"}"\n'
    (folder / "fatbin.s").write_text(source)
    made = folder / "made.so"
    subprocess.run(["gcc", "-shared", "-o", str(made), str(folder / "fatbin.s")], check=True, timeout=60)
    return made.read_bytes()


def test_every_package_is_pinned():
    named = [line for line in (HERE / "packages.txt").read_text().splitlines() if not line.startswith("#")]
    assert named == sorted(named)
    assert {canonicalize_name(name) for name in named} <= pins().keys()


def test_only_hoppers_code_is_kept(tmp_path):
    hopper, others = entry(CODE, 90, b"hopper's" * 8), entry(CODE, 80, b"ampere's" * 9)
    whole = extension(tmp_path, container(others, hopper, entry(PTX, 90, b"words..." * 4)))
    kept = cut(whole)
    assert len(kept) == len(whole)
    assert whole.index(others) == kept.index(hopper)
    size = struct.unpack_from("<Q", kept, kept.index(hopper) - 8)[0]
    assert size == len(hopper)
    assert b"ampere's" not in kept
    assert b"words..." not in kept


def test_containers_without_hoppers_code_stay_readable(tmp_path):
    least = entry(CODE, 80, b"least")
    whole = extension(
        tmp_path,
        container(entry(CODE, 90, b"hopper" * 4)),
        container(entry(CODE, 80, b"x" * 64)),
        container(least),
    )
    kept = cut(whole, only=re.compile(b"nothing has such a name"))
    assert kept.count(least) == 3
    assert b"hopper" not in kept
