"""Reads and writes pinned maps through bpf(2), and compiles BPF programs into a cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
import tempfile
from importlib import resources
from pathlib import Path

from tailcut.errors import ConfigError
from tailcut.tools.testbed import system

_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280}
_MAP_LOOKUP, _MAP_UPDATE, _OBJ_GET = 1, 2, 7
_LIBC = ctypes.CDLL(None, use_errno=True)
_NO_HEADERS = "file not found"


class PinnedMap:
    """A map of 32-bit keys that is pinned in a BPF file system."""

    def __init__(self, path: Path) -> None:
        name = ctypes.create_string_buffer(os.fsencode(path))
        self._fd = _bpf(_OBJ_GET, struct.pack("=QII", ctypes.addressof(name), 0, 0))

    def write(self, key: int, value: bytes) -> None:
        self._element(_MAP_UPDATE, key, ctypes.create_string_buffer(value, len(value)))

    def read(self, key: int, size_bytes: int) -> bytes:
        value = ctypes.create_string_buffer(size_bytes)
        self._element(_MAP_LOOKUP, key, value)
        return value.raw

    def close(self) -> None:
        os.close(self._fd)

    def _element(self, command: int, key: int, value: ctypes.Array[ctypes.c_char]) -> None:
        key_cell = ctypes.c_uint32(key)
        places = ctypes.addressof(key_cell), ctypes.addressof(value)
        _bpf(command, struct.pack("=I4xQQQ", self._fd, *places, 0))


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() not in _SYSCALL:
        raise ConfigError(
            f"the testbed's BPF switch does not know {platform.machine()}: use --switch forwarder"
        )
    cell = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    result: int = _LIBC.syscall(_SYSCALL[platform.machine()], command, cell, 128)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def compiled(source_name: str) -> Path:
    """Return the object file of a BPF program of this package. clang builds it unless a build is cached."""
    source = resources.files("tailcut.tools.testbed").joinpath(source_name).read_bytes()
    key = hashlib.sha256(source + platform.machine().encode()).hexdigest()[:16]
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tailcut")
    path = directory / f"{source_name.removesuffix('.c')}-{key}.o"
    if path.exists():
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as building:
            part = Path(building, path.name)
            _compile(source, part)
            part.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror}; set XDG_CACHE_HOME") from error
    return path


def _compile(source: bytes, path: Path) -> None:
    headers = f"/usr/include/{platform.machine()}-linux-gnu"  # where Debian keeps <asm/types.h>
    options = ["-O2", "-g", "-target", "bpf", "-I", headers, "-x", "c", "-", "-c", "-o", str(path)]
    try:
        system.run("clang", *options, stdin=source.decode())
    except ConfigError as error:
        if _NO_HEADERS in str(error):
            raise ConfigError(f"{error}; apt-get install libbpf-dev linux-libc-dev") from None
        raise
