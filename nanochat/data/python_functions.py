"""The public functions of the running Python's standard library, and questions about each of them.

The functions are read from source files. Nothing is imported: an import of some modules opens a browser,
prints a text or needs a display. Functions whose parameters the text alone does not give are left out: those
with decorators that may change them, and those with a default that is no literal.

The answers come from inspect.signature of the text that the question shows.
"""

import ast
import inspect
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import NamedTuple

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
    bound: str  # the first parameter of a method, such as "self"; "" if a call passes all parameters
    signature: tuple[Parameter, ...]  # the others
    summary: str  # the first sentence of its docstring, or ""

    @property
    def qualified_name(self) -> str:
        """Such as json.JSONEncoder.encode."""
        return ".".join(part for part in (self.module, self.class_name, self.name) if part)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters of a call as they are written, "*" and "/" included."""
        written, kinds = [*map(str, self.signature)], [parameter.kind for parameter in self.signature]
        if Parameter.KEYWORD_ONLY in kinds and Parameter.VAR_POSITIONAL not in kinds:
            written.insert(kinds.index(Parameter.KEYWORD_ONLY), "*")
        if Parameter.POSITIONAL_ONLY in kinds:
            written.insert(kinds.count(Parameter.POSITIONAL_ONLY), "/")
        return tuple(written)


def read_functions(root: Path) -> list[Function]:
    """The functions under `root`, sorted by module, then by place in the file.

    If functions have the same name and parameters, the first is kept. Files that cannot be read or parsed are
    skipped. Raises UserError if no function is found.
    """
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
            function = Function(module, class_name, node.name, *_signature(node, class_name), _summary(node))
            parameters = function.parameters
            plain = all(text.isascii() and text.isprintable() for text in (node.name, *parameters))
            if plain and parameters and len(", ".join(parameters)) <= LONGEST_PARAMETERS:
                yield function


def _signature(node: ast.FunctionDef, class_name: str) -> tuple[str, tuple[Parameter, ...]]:
    """`Function.bound` and `Function.signature`; ("", ()) if the text alone does not give them."""
    decorators = {getattr(d, "id", getattr(d, "attr", "?")) for d in node.decorator_list}
    defaults = [default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None]
    if not decorators <= KEPT_DECORATORS or not all(map(_is_literal, defaults)):
        return "", ()
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    code = ast.unparse(ast.Lambda(node.args, ast.Constant(None)))  # runs nothing: defaults are literals
    parameters = tuple(inspect.signature(eval(code, {"__builtins__": {}})).parameters.values())
    if not class_name or "staticmethod" in decorators:
        return "", parameters
    first = parameters[0] if parameters else None
    if first is None or first.kind > first.POSITIONAL_OR_KEYWORD or first.default is not first.empty:
        return "", ()
    return first.name, parameters[1:]


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


# -- questions about a function


class Facts(NamedTuple):
    """What an answer is made from."""

    function: Function
    parameters: tuple[Parameter, ...]
    others: list[str]  # names of parameters of any function
    rng: random.Random


# Answers that take more than a line, see Kind


def next_parameter(facts):
    if len(facts.parameters) > 1:
        at = facts.rng.randrange(len(facts.parameters) - 1)
        a, b = (parameter.name for parameter in facts.parameters[at : at + 2])
        return {"p": a}, f"After {a} comes {b}."


def default_value(facts):
    optional = [parameter for parameter in facts.parameters if parameter.default is not parameter.empty]
    if optional:
        chosen = facts.rng.choice(optional)
        return {"p": chosen.name}, f"By default, {chosen.name}={chosen.default!r}."


def number_of_parameters(facts):
    n = len(facts.parameters)
    if n == 1 and facts.rng.random() < 0.7:  # else half of the answers are 1
        return None
    return {}, f"The function {facts.function.name} has {n} parameter{'s' if n > 1 else ''}."


def has_parameter(facts):
    names = [parameter.name for parameter in facts.parameters]
    absent = [other for other in facts.others if other not in names]
    if facts.rng.random() < 0.5 or not absent:
        name = facts.rng.choice(names)
        return {"p": name}, f"Yes, {facts.function.name} has a parameter {name}."
    name = facts.rng.choice(absent)
    return {"p": name}, f"No, {facts.function.name} has no parameter {name}."


def keyword_only(facts):
    if any(parameter.kind == parameter.KEYWORD_ONLY for parameter in facts.parameters):
        return {}, f"Yes, {facts.function.name} takes keyword-only arguments."
    if facts.rng.random() < 0.06:  # about as many without them as with them
        return {}, f"No, {facts.function.name} takes no keyword-only arguments."


def call(facts):
    if all(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in facts.parameters):
        return {}, f"The call is {facts.function.name}({', '.join(p.name for p in facts.parameters)})."


class Kind(NamedTuple):
    """A kind of question: the function that answers it, and its wordings.

    {code} is replaced by the text that answers it, {name} by the function, {p} by a parameter. answer(facts)
    is ({placeholder of the question: text}, answer), or false if the question does not apply.
    """

    share: float  # how often it is drawn, relative to the others
    answer: Callable
    first: tuple[str, ...]  # wordings at the start of a conversation
    later: tuple[str, ...] = ()  # wordings after another question


KINDS = (
    Kind(2.0, lambda f: len(f.parameters) > 1 and ({}, f"The first parameter is {f.parameters[0].name}."), (
        "What is the first parameter of this function?\n\n{code}",
        "{code}\n\nName the first parameter of {name}.",
        "Look at this definition:\n\n{code}\n\nWhich parameter comes first?",
    ), ("What is its first parameter?", "Which parameter comes first?")),
    Kind(2.0, lambda f: len(f.parameters) > 1 and ({}, f"The last parameter is {f.parameters[-1].name}."), (
        "What is the last parameter of this function?\n\n{code}",
        "{code}\n\nName the last parameter of {name}.",
        "Look at this definition:\n\n{code}\n\nWhich parameter comes last?",
    ), ("What is its last parameter?", "And which parameter comes last?")),
    Kind(2.0, next_parameter, (
        "{code}\n\nWhich parameter comes after {p}?",
        "Which parameter follows {p} here?\n\n{code}",
        "What comes after {p} in the signature of {name}?\n\n{code}",
    ), ("Which parameter comes after {p}?", "And what follows {p}?")),
    Kind(4.0, default_value, (
        "{code}\n\nWhat is the default of {p}?",
        "What is {p} by default?\n\n{code}",
        "Which value does {p} have if {name} is called without it?\n\n{code}",
        "{code}\n\nGive the default value of {p}.",
    ), ("What is the default of {p}?", "And what is {p} by default?")),
    Kind(1.5, number_of_parameters, (
        "How many parameters does this function have?\n\n{code}",
        "{code}\n\nHow many parameters does {name} have?",
        "Count the parameters of {name}.\n\n{code}",
    ), ("How many parameters does it have?",)),
    Kind(1.0, has_parameter, (
        "Does this function have a parameter {p}?\n\n{code}",
        "{code}\n\nIs {p} a parameter of {name}?",
        "Is there a parameter {p} here?\n\n{code}",
    ), ("Does it have a parameter {p}?", "Is {p} one of its parameters?")),
    Kind(9.0, keyword_only, (  # few functions have them
        "Does this function take keyword-only arguments?\n\n{code}",
        "{code}\n\nDoes {name} take keyword-only arguments?",
        "{code}\n\nCan some arguments of {name} only be given by keyword?",
    ), ("Does it take keyword-only arguments?",)),
    Kind(2.0, call, (
        "Call this function with the names of its parameters, in order.\n\n{code}",
        "{code}\n\nComplete the call of {name}, in the order of its parameters.",
        "How do I call {name} with variables named like its parameters?\n\n{code}",
    ), ("Now write a call of it, in the order of its parameters.",)),
    Kind(2.0, lambda f: ({}, f"The function is {f.function.name}."), (
        "What is the name of this function?\n\n{code}",
        "{code}\n\nWhich function is this?",
        "Which function is defined here?\n\n{code}",
    )),
    Kind(2.0, lambda f: f.function.class_name and f.function.bound == "self" and (
        {}, f"The method {f.function.name} belongs to {f.function.class_name}."
    ), (
        "{in_class}\n\nWhich class does {name} belong to?",
        "Which class defines {name} here?\n\n{in_class}",
        "Name the class of the method {name}.\n\n{in_class}",
    )),
    Kind(2.0, lambda f: not f.function.class_name and ({}, f"It imports from {f.function.module}."), (
        "{line}\n\nWhich module does this line import from?",
        "Which module is used here?\n\n{line}",
        "From which module does this line import {name}?\n\n{line}",
    )),
    Kind(2.0, lambda f: not f.function.class_name and ({}, f"It imports the name {f.function.name}."), (
        "{line}\n\nWhat does this line import?",
        "Which name does this line import?\n\n{line}",
        "Which name can I use after this line?\n\n{line}",
    )),
    Kind(1.5, lambda f: f.function.summary and ({}, f.function.summary), (
        "What does {qualified_name} do?",
        "What is {qualified_name} for?",
        "Explain {qualified_name} in one sentence.",
        "{code}\n\nWhat does {name} do?",
    ), ("What does it do?", "And what does it do?")),
)  # fmt: skip


def texts(facts: Facts) -> dict[str, str]:
    """{placeholder: text} of questions about a function. Half of the longer signatures have several lines."""
    function, parameters = facts.function, facts.function.parameters
    code = f"def {function.name}({', '.join(parameters)}):"
    if len(parameters) > 1 and facts.rng.random() < 0.5:
        code = "\n".join([f"def {function.name}(", *(f"    {text}," for text in parameters), "):"])
    with_self = ", ".join(("self", *parameters))
    return {
        "code": code,
        "in_class": f"class {function.class_name}:\n    def {function.name}({with_self}):",
        "line": f"from {function.module} import {function.name}",
        "name": function.name,
        "qualified_name": function.qualified_name,
    }
