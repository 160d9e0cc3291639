"""The public functions of the running Python's standard library, read from its source files.

Nothing is imported: some modules do things when they are imported (they open a browser, print a text, need a
display). Functions whose text does not say everything are left out: those with decorators that may change
the parameters, and those with a default that is no literal.
"""

import ast
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat import UserError

# Tests, tables and programs, and modules that newer versions of Python do not have
LEFT_OUT = {
    "antigravity", "asynchat", "asyncore", "cgi", "cgitb", "distutils", "encodings", "ensurepip", "idlelib",
    "imp", "lib2to3", "msilib", "nntplib", "pydoc_data", "smtpd", "telnetlib", "test", "tests", "this",
    "tkinter", "turtle", "turtledemo",
}  # fmt: skip
KEPT_DECORATORS = {"staticmethod", "classmethod", "abstractmethod"}  # they leave the other parameters alone
LONGEST_PARAMETERS = 90  # characters
LONGEST_SUMMARY = 120  # characters


@dataclass(frozen=True)
class Function:
    """A function or method, without annotations."""

    module: str
    class_name: str  # "" for a function
    name: str
    bound: str  # the first parameter of a method, which a call fills in: "self"; "" if it has none
    parameters: tuple[str, ...]  # the others, as they stand in the parentheses, "*" and "/" included
    summary: str  # the first sentence of its docstring, or ""

    @property
    def qualified_name(self) -> str:
        """Such as json.JSONEncoder.encode."""
        return ".".join(part for part in (self.module, self.class_name, self.name) if part)

    def signature(self) -> inspect.Signature:
        """What Python makes of the parameters. The defaults are literals, so nothing else is executed."""
        namespace = {}
        exec(f"def function({', '.join(self.parameters)}): pass", {"__builtins__": {}}, namespace)
        return inspect.signature(namespace["function"])


def read_functions(root: Path | None = None) -> list[Function]:
    """The functions under `root` (the standard library), sorted by module, then as they stand in it.

    Of functions with the same name and parameters the first is kept. Files that cannot be read or parsed are
    skipped. Raises UserError if no function is found.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: dict[tuple, Function] = {}
    for path, module in _modules(root):
        try:
            with warnings.catch_warnings():  # about old escapes in strings
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text("utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        for function in _functions(tree.body, module, ""):
            found.setdefault((function.name, function.parameters), function)
    if not found:
        raise UserError(
            f"this Python has no source files in {root}; give your own conversations with --data=PATH"
        )
    return list(found.values())


def _modules(root: Path) -> list[tuple[Path, str]]:
    """(file, module) of the public modules, sorted by module. Folders that are left out are not entered."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if _is_public(name)]
        package = Path(folder).relative_to(root).parts
        for name in files:
            stem, _, suffix = name.partition(".")
            if suffix == "py" and stem == "__init__" and package:
                found.append((Path(folder, name), ".".join(package)))
            elif suffix == "py" and _is_public(stem):
                found.append((Path(folder, name), ".".join((*package, stem))))
    return sorted(found, key=lambda pair: pair[1])


def _is_public(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name not in LEFT_OUT


def _functions(body: list[ast.stmt], module: str, class_name: str) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not class_name and not node.name.startswith("_"):
            yield from _functions(node.body, module, node.name)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            bound, *parameters = _parameters(node, bool(class_name))
            plain = all(text.isascii() and text.isprintable() for text in (node.name, *parameters))
            if plain and parameters and len(", ".join(parameters)) <= LONGEST_PARAMETERS:
                yield Function(module, class_name, node.name, bound, tuple(parameters), _summary(node))


def _parameters(node: ast.FunctionDef, method: bool) -> list[str]:
    """What a call of a method fills in, or "", and the other parameters as text.

    They are left out if they cannot be told from the text.
    """
    decorators = {getattr(d, "id", getattr(d, "attr", "?")) for d in node.decorator_list}
    if not decorators <= KEPT_DECORATORS:
        return [""]
    a = node.args
    if not all(_is_literal(default) for default in (*a.defaults, *a.kw_defaults) if default is not None):
        return [""]
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    named = [x.arg if d is None else f"{x.arg}={d}" for x, d in zip(positional, defaults, strict=True)]
    bound, positional_only = "", len(a.posonlyargs)
    if method and "staticmethod" not in decorators:
        if not named or defaults[0] is not None:
            return [""]
        bound, named, positional_only = named[0], named[1:], max(0, positional_only - 1)
    if positional_only:
        named.insert(positional_only, "/")
    if a.vararg:
        named.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        named.append("*")
    for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        named.append(x.arg if d is None else f"{x.arg}={ast.unparse(d)}")
    if a.kwarg:
        named.append(f"**{a.kwarg.arg}")
    return [bound, *named]


def _is_literal(node: ast.expr) -> bool:
    """Whether a default can be executed and written as an answer: no `set()` or other call, no `...`."""
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    parts = list(ast.walk(node))
    return not any(isinstance(part, ast.Call) or getattr(part, "value", None) is ... for part in parts)


def _summary(node: ast.FunctionDef) -> str:
    """The first sentence of the docstring, if it is short and plain."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    sentence, dot, _ = text.partition(". ")
    sentence = sentence + "." if dot else sentence
    plain = sentence.isascii() and sentence.isprintable()
    good = plain and sentence.endswith(".") and 20 <= len(sentence) <= LONGEST_SUMMARY
    return sentence if good else ""
