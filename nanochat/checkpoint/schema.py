"""What the JSON files of a checkpoint hold, checked when it is opened.

Checksums find damage, but not a file of another program or of another nanochat. So the names and types that
are read later are checked here. A form is a function of a value. It returns what is wrong with the value, as
the end of a sentence that begins with the value's name, or "".
"""

from nanochat.checkpoint.files import damaged


def simple(what, test):
    """The form of the values for which test(value) is true. what: its name in a message."""
    return lambda v: "" if test(v) else _is_not(v, what)


def whole(least=0):
    """A whole number from `least` on."""
    return simple(f"a whole number >= {least}", lambda v: type(v) is int and v >= least)


def either(*forms):
    """A value of one of these forms. If it has none of them, the message names the last."""
    return lambda v: "" if any(form(v) == "" for form in forms) else forms[-1](v)


def mapping(each):
    """An object in which each value has this form, under any name."""
    return lambda v: fields(dict.fromkeys(v, each))(v) if isinstance(v, dict) else _is_not(v, "an object")


def fields(forms, required=()):
    """An object whose values under these names have these forms. Those in `required` must be there."""

    def check(v):
        if not isinstance(v, dict):
            return _is_not(v, "an object")
        if missing := [name for name in required if name not in v]:
            return f" has no {missing[0]}"
        wrong = (f".{name}{said}" for name, form in forms.items() if name in v and (said := form(v[name])))
        return next(wrong, "")

    return check


def _is_not(value, what):
    shown = {dict: "an object", list: "a list"}.get(type(value)) or ascii(value)
    return f" is {shown:.40} and not {what}"


def check(path, value, form):
    """Raise Damaged if the content of that file does not have this form."""
    if wrong := form(value):
        raise damaged(path, f"is not what a run writes: {path.stem}{wrong}")


number = simple("a number", lambda v: type(v) in (int, float))
numbers = simple("a list of numbers", lambda v: isinstance(v, list) and not any(map(number, v)))
text = simple("text", lambda v: isinstance(v, str))
truth = simple("true or false", lambda v: isinstance(v, bool))
nothing = simple("null", lambda v: v is None)
anything = simple("anything", lambda v: True)

_FILE = fields({"size": whole(), "sha256": text}, required=("size", "sha256"))
_MANIFEST = {"step": whole(), "world_size": whole(1), "files": mapping(_FILE)}
MANIFEST = fields(_MANIFEST, required=_MANIFEST)

_PLAIN = either(number, truth, nothing, numbers, text)
_IDENTITY = fields({"model": mapping(_PLAIN)})
_STATE = {
    "identity": _IDENTITY,
    "resolved": mapping(either(_PLAIN, mapping(_PLAIN))),
    "num_iterations": whole(),
    "loader": mapping(anything),
    "scaler": mapping(number),
    "loop": mapping(_PLAIN),
}
STATE = fields({"identity": _IDENTITY})  # what inference reads
STATE_TO_CONTINUE = fields(_STATE, required=_STATE)
