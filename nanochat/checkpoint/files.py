"""What a checkpoint is made of: synced and hashed files, safetensors, strict JSON."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanochat import UserError

CHUNK = 1 << 20  # bytes hashed and then written at a time: few enough for the CPU's cache
DTYPES = {  # their names in the safetensors format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8",
    torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


class Damaged(UserError):
    """A checkpoint does not match its manifest. The message names the checkpoint, the file and the reason."""


# Files


def write_file(path, blocks):
    """Write blocks of bytes to a new file in the folder of a save, and sync it; returns {"size", "sha256"}.
    Raises OSError; its `filename` is always set."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "wb") as f:
            for block in blocks:
                for start in range(0, len(block), CHUNK):
                    piece = block[start : start + CHUNK]
                    digest.update(piece)
                    f.write(piece)
                size += len(block)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    return {"size": size, "sha256": digest.hexdigest()}


def sync_folder(path):
    """Make sure that the names in a folder survive a power failure."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_folder(path):
    """Delete a checkpoint. It is renamed first, so that no half of a checkpoint has its name."""
    doomed = path.with_name(f".tmp-gone-{path.name}")
    attempt(shutil.rmtree, doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def attempt(function, *args):
    """Call a function and return the OSError or UserError that it raises, if any: clean-up must neither hide
    another error nor end a run."""
    try:
        function(*args)
    except (OSError, UserError) as e:
        return e


def reason(error):
    """An OSError in a few words, with the name of the file if it has one."""
    return (f"{Path(error.filename).name}: " if error.filename else "") + (error.strerror or str(error))


# Tensors


def write_tensors(path, tensors):
    """Write {name: tensor} in the safetensors format; returns and raises what `write_file` does.

    Unlike safetensors' own writer, this one hashes in the same pass, needs no second copy in memory, releases
    Python's lock, and raises the system's own errors. Tied tensors are stored once for each name.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # keeps each one aligned
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        span, offset = [offset, end], end
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    flat = (tensor.detach().cpu().contiguous().reshape(-1) for _, tensor in ordered)
    return write_file(path, itertools.chain([head], (memoryview(t.view(torch.uint8).numpy()) for t in flat)))


def read_tensors(path, wanted=lambda name: True):
    """{name: tensor} of a safetensors file, for the names where wanted(name) is true.

    The tensors are copies: the file is memory-mapped, and it may be deleted later. Raises Damaged, also for a
    file whose header does not say where each byte belongs.
    """
    try:
        with _reading(path), safe_open(path, framework="pt") as f:
            return {n: f.get_tensor(n).clone() for n in f.offset_keys() if wanted(n)}
    except SafetensorError as e:
        raise damaged(path, f"cannot be read ({e})") from e


# JSON and verification


def to_json(value):
    """Bytes of strict JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # what UTF-8 cannot hold becomes an escape of JSON


def read_json(path):
    """The bytes of a file, and the JSON object in them. Raises Damaged if they hold none."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    with _reading(path):
        raw = path.read_bytes()
    try:
        value = json.loads(raw.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as e:
        raise damaged(path, f"is not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise damaged(path, "is not a JSON object")
    return raw, value


def verify_file(path, entry):
    """Raise Damaged if a file is missing or does not have the size and checksum of its manifest entry."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    with _reading(path), open(path, "rb", buffering=0) as f:
        actual = os.fstat(f.fileno()).st_size
        if actual != entry["size"]:
            raise damaged(path, f"has {actual:,} bytes instead of {entry['size']:,}")
        while n := f.readinto(buffer):
            digest.update(buffer[:n])
    if digest.hexdigest() != entry["sha256"]:
        raise damaged(path, "does not match its checksum")


@contextlib.contextmanager
def _reading(path):
    """Raise Damaged for a file that is missing or cannot be read, and for a pipe, a device or a folder.
    Missing permission is no damage: that error stays as it is."""
    if path.exists() and not path.is_file():  # opening a pipe would wait, and /dev/zero has no end
        raise damaged(path, "is not a file")
    try:
        yield
    except PermissionError:
        raise
    except FileNotFoundError as e:
        raise damaged(path, "is missing") from e
    except OSError as e:
        raise damaged(path, f"cannot be read ({e.strerror or e})") from e


def damaged(path, what):
    """The Damaged error for one file of a checkpoint."""
    return Damaged(f"checkpoint {path.parent} is damaged: {path.name} {what}")
