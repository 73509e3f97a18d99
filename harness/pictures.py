"""Image files for tests, good and hostile, made on the spot."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any

from PIL import Image


def picture(mode: str = "RGB", size: tuple[int, int] = (33, 21)) -> Image.Image:
    """Return an image in which every pixel differs from its neighbours."""
    return Image.frombytes("RGB", size, bytes(i * 37 % 251 for i in range(size[0] * size[1] * 3))).convert(
        mode
    )


def noise(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return an image of coloured squares; images of different seeds have nothing in common."""
    draw = random.Random(seed)
    width, height = size[0] // 8, size[1] // 8
    small = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    return small.resize(size, Image.Resampling.NEAREST)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    """Return a file whose EXIF data have this orientation (1 to 8)."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture(), kind, exif=exif)


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int, height: int, *chunks: bytes, bits: int = 1, color: int = 0, rows: bytes | None = None
) -> bytes:
    """Return a PNG of any size; by default of zeros, so that it is small whatever its size."""
    if rows is None:
        pack = zlib.compressobj(9)
        row = b"\0" * (1 + (width * bits * {0: 1, 2: 3, 6: 4}[color] + 7) // 8)
        rows = b"".join(pack.compress(row) for _ in range(height)) + pack.flush()
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def webp_header(width: int, height: int) -> bytes:
    """Return an extended WebP header that promises a canvas of this size."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size
    body += b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    still = saved(picture(), "WEBP", lossless=True)[12:]
    frame = b"\0" * 6 + (32).to_bytes(3, "little") + (20).to_bytes(3, "little") + b"\0\0\0\0" + still
    body += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


def frames(kind: str) -> bytes:
    """Return an animation of two frames as GIF, WEBP or PNG."""
    return saved(picture(), kind, save_all=True, append_images=[picture().rotate(180)], duration=100)
