"""What the JSON files of a checkpoint hold, checked when it is opened.

Checksums find damage, but not a file of another program or of another nanochat. So the names and types that
are read later are checked here. A form is

    int                     the type itself
    range(1, 9)             a whole number in it
    [int, str]              a list whose items have one of these types
    {"a": int, "b?": str}   an object with these names; it may lack "b", and other names may hold anything
    {...: int}              an object with any names
    None                    anything
    (int, [int])            one of several forms
"""

from nanochat.checkpoint.files import damaged

WHOLE = range(2**63)
NUMBER = int, float
PLAIN = (*NUMBER, bool, str, type(None), [*NUMBER, str])
MANIFEST = {"step": WHOLE, "world_size": range(1, 2**31), "files": {...: {"size": WHOLE, "sha256": str}}}
STATE_TO_CONTINUE = {
    "identity": {"model?": {"bigrams?": range(2**20), "value_tables?": (range(3), bool), ...: PLAIN}},
    "resolved": {"rates?": {...: NUMBER}, ...: (*PLAIN, {...: PLAIN})},
    "num_iterations": WHOLE,
    "loader": dict,
    "scaler": {...: NUMBER},
    "loop": {...: PLAIN},
}
STATE = {f"{name}?": form for name, form in STATE_TO_CONTINUE.items()}  # for all else than to continue a run
CONFIG = {
    "settings?": {...: {"value": None}},
    "plan?": [str],
    "versions?": {...: None},
    "sources?": {...: None},
}


def check(path, value, form):
    """Raise Damaged if the content of that file does not have this form."""
    if said := _wrong(value, form):
        raise damaged(path, f"is not what a run writes: {path.stem}{said}")


def _wrong(value, form) -> str:
    """How a value differs from a form: the end of a sentence that begins with its name; "" if it fits."""
    if isinstance(form, tuple):
        return min((_wrong(value, one) for one in form), key=len)
    if isinstance(form, dict) and isinstance(value, dict):
        if missing := [n for n in form if n is not ... and n[-1] != "?" and n not in value]:
            return f" has no {missing[0]}"
        parts = ((n, part, form.get(n, form.get(f"{n}?", form.get(...)))) for n, part in value.items())
        return next((f".{n}{said}" for n, part, of in parts if of and (said := _wrong(part, of))), "")
    if isinstance(form, list) and isinstance(value, list):
        return "" if all(type(item) in form for item in value) else f" is {value!a:.40}"
    if isinstance(form, range):
        return "" if type(value) is int and value in form else f" is {value!a:.40}"
    return "" if type(value) is form else f" is {value!a:.40}"
