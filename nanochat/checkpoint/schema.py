"""What the files of a checkpoint hold: types and shapes, checked when it is opened.

Checksums find damage. They do not find a file that a stranger or another program has written, so everything
that is read later is checked here first. A form is a function of a value; it returns what is wrong with it,
as the end of a sentence that begins with the value's name, or "" if nothing is.
"""

import dataclasses
import json
import math
import re
import typing

from nanochat.checkpoint.files import DTYPES, Damaged, damaged, refuse_endless
from nanochat.run.metrics import LoopState

MOST_HEADER_BYTES = 100_000_000  # of a safetensors file, as in safetensors itself
MOST_DIMENSIONS = 16
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


# Forms


def whole(least=0, most=2**63 - 1):
    """A whole number in a range, which fits into 64 bits."""
    which = f"a whole number >= {least}" + (f" and <= {most}" if most < 2**63 - 1 else "")
    return lambda v: "" if type(v) is int and least <= v <= most else _is_not(v, which)


def number(v):
    """A finite number."""
    fits = math.isfinite(v) if type(v) is float else type(v) is int and abs(v) < 2**63
    return "" if fits else _is_not(v, "a number")


def above_zero(v):
    return number(v) or ("" if v > 0 else _is_not(v, "a number above 0"))


def text(v):
    """Text that can be written as UTF-8."""
    return "" if isinstance(v, str) and not re.search("[\ud800-\udfff]", v) else _is_not(v, "text")


def truth(v):
    return "" if isinstance(v, bool) else _is_not(v, "true or false")


def nothing(v):
    return "" if v is None else _is_not(v, "null")


def either(*forms):
    """A value that has one of these forms; the last one is named if it has none."""
    return lambda v: "" if any(form(v) == "" for form in forms) else forms[-1](v)


def both(*forms):
    """A value that has all of these forms."""
    return lambda v: next((wrong for form in forms if (wrong := form(v))), "")


def listed(form, length=None):
    """A list of values of one form."""

    def check(v):
        if not isinstance(v, list) or length not in (None, len(v)):
            return _is_not(v, "a list" if length is None else f"a list of {length}")
        return _first(((f"[{i}]", item, form) for i, item in enumerate(v)))

    return check


def mapping(form):
    """An object in which each value has the same form, under any name."""

    def check(v):
        if not isinstance(v, dict):
            return _is_not(v, "an object")
        return _first((f".{_short(key)}", key, text) for key in v) or _first(
            (f".{_short(key)}", item, form) for key, item in v.items()
        )

    return check


def fields(forms, required=(), only=False):
    """An object with these names. Those in `required` must be there; only: no others may be."""

    def check(v):
        if not isinstance(v, dict):
            return _is_not(v, "an object")
        if missing := [name for name in required if name not in v]:
            return f" has no {missing[0]}"
        if only and (unknown := sorted(v.keys() - forms.keys())):
            return f" has {_short(unknown[0])}, which this nanochat does not know"
        return _first((f".{name}", v[name], form) for name, form in forms.items() if name in v)

    return check


def data_class(kind):
    """An object whose values are arguments of a data class, checked by its annotations. A new field of the
    class needs nothing here, unless its type is a new one."""
    forms = {
        int: whole(), float: number, str: text, bool: truth, list[float]: listed(number),
        list[str]: listed(text), str | None: either(nothing, text), float | None: either(nothing, number),
    }  # fmt: skip
    hints = typing.get_type_hints(kind)
    return fields({f.name: forms[hints[f.name]] for f in dataclasses.fields(kind)}, only=True)


def _first(named):
    """The first thing that is wrong in (name, value, form) triples, with its name before it."""
    return next((name + wrong for name, value, form in named if (wrong := form(value))), "")


def _is_not(value, what):
    return f" is {_short(value)} and not {what}"


def _short(value):
    """A value in a message: escapes for what a terminal would obey, and no more than a few words of it."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if type(value) is int and abs(value) >= 2**63:
        return "a huge number"
    shown = ascii(value) if isinstance(value, str) else str(value)
    return shown if len(shown) <= 40 else shown[:40] + "..."


# manifest.json and state.json

_FILE = fields({"size": whole(), "sha256": text}, required=("size", "sha256"))
MANIFEST = fields(
    {"step": whole(), "world_size": whole(1), "files": mapping(_FILE)},
    required=("step", "world_size", "files"),
)

_LANE = {"epoch": whole(), "taken": whole(), "pieces": listed(listed(whole(), 2))}
_STREAM = {"rows_per_step": whole(1), "max_seq_len": whole(1)}
_STREAM |= {"lanes": mapping(fields(_LANE, required=_LANE))}
_OF_PUBLIC = fields(_STREAM | {"shards": whole(1)}, required=_STREAM)  # nobody has counted its documents
_TRAIN_LOADER = fields(_STREAM | {"documents": whole()}, required=(*_STREAM, "documents"))
_CONVERSATIONS = {"rows_per_step": whole(1), "max_seq_len": whole(1), "conversations": whole(1)}
_CONVERSATIONS |= {"epoch": whole(), "row": whole()}


def loader(v):
    """The state of a loader; what ours write is known, that of another loader may be anything."""
    if not isinstance(v, dict):
        return _is_not(v, "an object")
    if "lanes" not in v and "packing" not in v:
        return ""
    if "conversations" in v:
        return fields(_CONVERSATIONS, required=_CONVERSATIONS)(v)
    if wrong := _OF_PUBLIC(v) if "shards" in v else _TRAIN_LOADER(v):
        return wrong
    lanes, documents = v["lanes"], math.inf if "shards" in v else v["documents"]
    if len(lanes) != v["rows_per_step"] or any(str(lane) not in lanes for lane in range(len(lanes))):
        return f".lanes are not those from 0 to {v['rows_per_step'] - 1}"
    if any(p["taken"] > documents or any(d >= documents for d, _ in p["pieces"]) for p in lanes.values()):
        return f".lanes are beyond the {documents} documents of the text"
    return ""


_SCALER = {"scale": above_zero, "growth_factor": above_zero, "backoff_factor": above_zero}
_SCALER |= {"growth_interval": whole(1), "_growth_tracker": whole()}
_MODEL = mapping(either(number, truth, nothing, listed(number), text))
_LENGTH = fields({"max_seq_len": whole(2, 2**20)})  # the one size that no tensor shows, as in base_train
_IDENTITY = {"model": both(_MODEL, _LENGTH)}
_STATE = {
    "identity": fields(_IDENTITY | {"total_batch_size": whole(1)}),
    "resolved": fields(
        {
            "compiled": truth,
            "eager_steps": whole(),
            "device_batch_size": whole(1),
            "rates": mapping(number),
            "attention": mapping(text),
            "fp8": truth,
            "aspect_ratio": whole(1, 4096),  # as in base_train
            "spelled": truth,
            "table_share": number,
            "target_minutes": above_zero,
            "estimated": truth,
        }
    ),
    "num_iterations": whole(),
    "optimizer": text,
    "loader": loader,
    "scaler": lambda v: "" if v == {} else fields(_SCALER, required=_SCALER)(v),
    "loop": data_class(LoopState),
}
STATE = fields({"identity": _STATE["identity"]})  # what inference reads
STATE_TO_CONTINUE = fields(_STATE, required=[name for name in _STATE if name != "optimizer"])


def check(path, value, form):
    """Raise Damaged if the content of that file does not have this form."""
    if wrong := form(value):
        raise damaged(path, f"is not what a run writes: {path.stem}{wrong}")


# Tensors

_TENSOR = {"dtype": text, "shape": listed(whole()), "data_offsets": listed(whole(), 2)}
_TENSOR = fields(_TENSOR, required=_TENSOR)


def check_tensors(path):
    """Raise Damaged if a safetensors file does not say where each of its bytes belongs: names, dtypes and
    shapes that fill the file from its header to its end."""
    try:
        refuse_endless(path)
        with open(path, "rb") as f:
            header_bytes = int.from_bytes(f.read(8), "little")
            data_bytes = path.stat().st_size - 8 - header_bytes
            if data_bytes < 0 or header_bytes > MOST_HEADER_BYTES:
                raise damaged(path, f"has a header of {header_bytes:,} bytes")
            header = json.loads(f.read(header_bytes).decode())
    except OSError as e:
        raise damaged(path, f"cannot be read ({e.strerror})") from e
    except Damaged:
        raise
    except (ValueError, RecursionError) as e:
        raise damaged(path, "has a header that is not JSON") from e
    if wrong := _wrong_header(header, data_bytes):
        raise damaged(path, f"has a header that is not one of tensors: it{wrong}")


def _wrong_header(header, data_bytes):
    if isinstance(header, dict) and (wrong := mapping(text)(header.pop("__metadata__", {}))):
        return f" has metadata that{wrong}"
    if wrong := mapping(_TENSOR)(header):
        return wrong
    at = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = tensor["data_offsets"]
        if tensor["dtype"] not in ITEM_BYTES or len(tensor["shape"]) > MOST_DIMENSIONS or len(name) > 1000:
            return f" has {_short(name)} of a type that no run writes, {_short(tensor['dtype'])}"
        if begin != at or end - begin != math.prod(tensor["shape"]) * ITEM_BYTES[tensor["dtype"]]:
            return f" has {_short(name)} at bytes {begin} to {end}, where it does not fit"
        at = end
    return "" if at == data_bytes else f" describes {at} bytes, and the file has {data_bytes}"
