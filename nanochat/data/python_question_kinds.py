"""The kinds of questions about a function: how they are asked, and who works out the answer.

The answers come from inspect.signature of the very text that the question shows.
"""

import inspect
import random
from collections.abc import Callable
from typing import NamedTuple

from nanochat.data.python_functions import Function


class Facts(NamedTuple):
    """What the makers of answers need."""

    function: Function
    parameters: list[inspect.Parameter]
    others: list[str]  # names of parameters of any function
    rng: random.Random


def _first(facts):
    if len(facts.parameters) > 1:
        return {}, f"The first parameter is {facts.parameters[0].name}."


def _last(facts):
    if len(facts.parameters) > 1:
        return {}, f"The last parameter is {facts.parameters[-1].name}."


def _next(facts):
    if len(facts.parameters) > 1:
        at = facts.rng.randrange(len(facts.parameters) - 1)
        a, b = (parameter.name for parameter in facts.parameters[at : at + 2])
        return {"p": a}, f"After {a} comes {b}."


def _default(facts):
    optional = [parameter for parameter in facts.parameters if parameter.default is not parameter.empty]
    if optional:
        chosen = facts.rng.choice(optional)
        return {"p": chosen.name}, f"By default, {chosen.name}={chosen.default!r}."


def _count(facts):
    n = len(facts.parameters)
    if n == 1 and facts.rng.random() < 0.7:  # else half of the answers are 1
        return None
    return {}, f"The function {facts.function.name} has {n} parameter{'s' if n > 1 else ''}."


def _has(facts):
    names = [parameter.name for parameter in facts.parameters]
    absent = [other for other in facts.others if other not in names]
    if facts.rng.random() < 0.5 or not absent:
        name = facts.rng.choice(names)
        return {"p": name}, f"Yes, {facts.function.name} has a parameter {name}."
    name = facts.rng.choice(absent)
    return {"p": name}, f"No, {facts.function.name} has no parameter {name}."


def _keyword_only(facts):
    if any(parameter.kind == parameter.KEYWORD_ONLY for parameter in facts.parameters):
        return {}, f"Yes, {facts.function.name} takes keyword-only arguments."
    if facts.rng.random() < 0.06:  # about as many without them as with them
        return {}, f"No, {facts.function.name} takes no keyword-only arguments."


def _call(facts):
    if all(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in facts.parameters):
        return {}, f"The call is {facts.function.name}({', '.join(p.name for p in facts.parameters)})."


def _name(facts):
    return {}, f"The function is {facts.function.name}."


def _class(facts):
    if facts.function.class_name and facts.function.bound == "self":
        return {}, f"The method {facts.function.name} belongs to {facts.function.class_name}."


def _module(facts):
    if not facts.function.class_name:
        return {}, f"It imports from {facts.function.module}."


def _imported(facts):
    if not facts.function.class_name:
        return {}, f"It imports the name {facts.function.name}."


def _documentation(facts):
    if facts.function.summary:
        return {}, facts.function.summary


class Kind(NamedTuple):
    """How a kind of question is asked, at first and later in a conversation, and who answers it.

    {code} stands for the text that answers it, {name} for the function, {p} for a parameter.
    """

    share: float  # how likely it is to be drawn, against the others
    answer: Callable  # (facts) -> (what else fills the templates, answer), or None if it does not apply
    first: tuple[str, ...]
    later: tuple[str, ...] = ()


KINDS = {
    "first parameter": Kind(
        2.0,
        _first,
        (
            "What is the first parameter of this function?\n\n{code}",
            "{code}\n\nName the first parameter of {name}.",
            "Look at this definition:\n\n{code}\n\nWhich parameter comes first?",
        ),
        ("What is its first parameter?", "Which parameter comes first?"),
    ),
    "last parameter": Kind(
        2.0,
        _last,
        (
            "What is the last parameter of this function?\n\n{code}",
            "{code}\n\nName the last parameter of {name}.",
            "Look at this definition:\n\n{code}\n\nWhich parameter comes last?",
        ),
        ("What is its last parameter?", "And which parameter comes last?"),
    ),
    "next parameter": Kind(
        2.0,
        _next,
        (
            "{code}\n\nWhich parameter comes after {p}?",
            "Which parameter follows {p} here?\n\n{code}",
            "What comes after {p} in the signature of {name}?\n\n{code}",
        ),
        ("Which parameter comes after {p}?", "And what follows {p}?"),
    ),
    "default value": Kind(
        4.0,
        _default,
        (
            "{code}\n\nWhat is the default of {p}?",
            "What is {p} by default?\n\n{code}",
            "Which value does {p} have if {name} is called without it?\n\n{code}",
            "{code}\n\nGive the default value of {p}.",
        ),
        ("What is the default of {p}?", "And what is {p} by default?"),
    ),
    "number of parameters": Kind(
        1.5,
        _count,
        (
            "How many parameters does this function have?\n\n{code}",
            "{code}\n\nHow many parameters does {name} have?",
            "Count the parameters of {name}.\n\n{code}",
        ),
        ("How many parameters does it have?",),
    ),
    "has a parameter": Kind(
        1.0,
        _has,
        (
            "Does this function have a parameter {p}?\n\n{code}",
            "{code}\n\nIs {p} a parameter of {name}?",
            "Is there a parameter {p} here?\n\n{code}",
        ),
        ("Does it have a parameter {p}?", "Is {p} one of its parameters?"),
    ),
    "keyword-only": Kind(
        9.0,  # few functions have them
        _keyword_only,
        (
            "Does this function take keyword-only arguments?\n\n{code}",
            "{code}\n\nDoes {name} take keyword-only arguments?",
            "{code}\n\nCan some arguments of {name} only be given by keyword?",
        ),
        ("Does it take keyword-only arguments?",),
    ),
    "call": Kind(
        2.0,
        _call,
        (
            "Call this function with the names of its parameters, in order.\n\n{code}",
            "{code}\n\nComplete the call of {name}, in the order of its parameters.",
            "How do I call {name} with variables named like its parameters?\n\n{code}",
        ),
        ("Now write a call of it, in the order of its parameters.",),
    ),
    "name": Kind(
        2.0,
        _name,
        (
            "What is the name of this function?\n\n{code}",
            "{code}\n\nWhich function is this?",
            "Which function is defined here?\n\n{code}",
        ),
    ),
    "class": Kind(
        2.0,
        _class,
        (
            "{in_class}\n\nWhich class does {name} belong to?",
            "Which class defines {name} here?\n\n{in_class}",
            "Name the class of the method {name}.\n\n{in_class}",
        ),
    ),
    "module": Kind(
        2.0,
        _module,
        (
            "{line}\n\nWhich module does this line import from?",
            "Which module is used here?\n\n{line}",
            "From which module does this line import {name}?\n\n{line}",
        ),
    ),
    "imported name": Kind(
        2.0,
        _imported,
        (
            "{line}\n\nWhat does this line import?",
            "Which name does this line import?\n\n{line}",
            "Which name can I use after this line?\n\n{line}",
        ),
    ),
    "documentation": Kind(
        1.5,
        _documentation,
        (
            "What does {qualified_name} do?",
            "What is {qualified_name} for?",
            "Explain {qualified_name} in one sentence.",
            "{code}\n\nWhat does {name} do?",
        ),
        ("What does it do?", "And what does it do?"),
    ),
}


def texts(facts: Facts) -> dict[str, str]:
    """What the templates may use of a function. Half of the longer signatures have a parameter a line."""
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
