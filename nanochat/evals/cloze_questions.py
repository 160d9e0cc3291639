"""Cloze questions about a text, made from the text itself: what comes next here?

A question is a passage (the query), what follows it in the text (the answer), and two or three wrong choices.
A group has as many questions as choices. All its questions offer the same choices, and each choice is right
once: the wrong choices of one question are the answers of the others. So a rule that looks at the choices
alone (the shortest, the most frequent, the first) scores exactly chance, and a model that scores more has
read the query.
"""

import ast
import hashlib
import io
import random
import re
import tokenize
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from nanochat.evals.bundle import SHUFFLE_SEED, Task

QUERY_CHARS = 240  # of a query at most; the time of an evaluation grows with it
CONTINUATION_CHARS = 40  # of a continuation, and then to the end of its word
QUESTIONS = 48  # of a task: whole groups of three and of four
FEWEST_QUESTIONS = 12  # a task with fewer is left out: its score would be noise
TEXT_CHARS = 500_000  # of the documents that questions are made from
OPEN_GROUPS = 64  # groups that wait for members; they are searched for each question

KEYWORDS = {"def", "return", "else", "import", "in", "is", "as", "and"}  # no two fit in the same place
OPENING = {")": "(", "]": "[", "}": "{"}
LEVELS = (4, 8, 12, 16)  # columns at which a line begins
NOT_PYTHON = (SyntaxError, ValueError, MemoryError, RecursionError, tokenize.TokenError)

Span = tuple[int, int]  # where an answer begins and ends in its document
Cloze = tuple[str, str]  # query, answer


# -- places in any text


def word_runs(text: str) -> Iterator[Span]:
    """A few words in a row. In scripts without blanks between words they begin and end anywhere."""
    wide = "[\u2e80-\U0010ffff]"
    begin, end = rf"(?<=\S)(?:\s(?=\S)|(?={wide}))", rf"\S{{1,40}}?(?=\s|{wide})"
    for match in re.finditer(rf"(?s){begin}.{{{CONTINUATION_CHARS}}}{end}", text):
        if match.start() >= QUERY_CHARS // 2:
            yield match.span()


def repeated_words(text: str) -> Iterator[Span]:
    """A word of four letters or more, with the blank before it, that occurs in the passage too."""
    latest = {}
    for match in re.finditer(r"(?<=\S) ([^\W\d_]{4,})\b", text):
        if latest.get(match[1], -1) >= query_start(text, match.start()):
            yield match.span()
        latest[match[1]] = match.start()


# -- places in Python's source


class Token(NamedTuple):
    """A token of Python's source; start and end are counted in characters of the whole document."""

    kind: int  # of the module `token`
    string: str
    start: int
    end: int
    column: int  # of its start, in its line


class PythonText:
    """A document that is Python: its syntax tree and its tokens. Raises one of NOT_PYTHON if it is not."""

    def __init__(self, text: str):
        self.text = text
        with warnings.catch_warnings():  # of odd escapes in strings
            warnings.simplefilter("ignore")
            self.tree = ast.parse(text)
        self.lines = [0]  # where each begins
        for line in io.StringIO(text, newline=""):
            self.lines.append(self.lines[-1] + len(line))
        self.tokens = []
        for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
            start, end = (self.lines[row - 1] + column for row, column in (token.start, token.end))
            self.tokens.append(Token(token.type, token.string, start, end, token.start[1]))


def keywords(python: PythonText) -> Iterator[Span]:
    """A keyword."""
    for token in python.tokens:
        if token.kind == tokenize.NAME and token.string in KEYWORDS:
            yield token.start, token.end


def brackets(python: PythonText) -> Iterator[Span]:
    """A closing bracket before a blank or the end of its line, whose opening bracket is in the passage."""
    opened = []
    for kind, string, start, end, _ in python.tokens:
        if kind == tokenize.OP and string in OPENING.values():
            opened.append(start)
        elif kind == tokenize.OP and string in OPENING and opened:
            inside = query_start(python.text, start) <= opened.pop() < start - 3
            if inside and python.text[end : end + 1].isspace():
                yield start, end


def indentations(python: PythonText) -> Iterator[Span]:
    """The blanks before a statement without the last one, which a tokenizer joins to the word after it."""
    ends = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
    before = tokenize.NEWLINE
    for token in python.tokens:
        if token.kind == tokenize.NAME and before in ends and token.column in LEVELS:
            yield token.start - token.column, token.start - 1
        before = token.kind


def arguments(python: PythonText) -> Iterator[Span]:
    """A use of an argument, whose name has three letters or more, in its function."""
    starts = [token.start for token in python.tokens]
    for node in ast.walk(python.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        names = {argument.arg for argument in taken} - {"self", "cls"}
        rows = node.lineno, node.body[0].lineno, node.end_lineno + 1  # counted from 1
        head, body, end = (python.lines[row - 1] for row in rows)
        for i in range(bisect_left(starts, body), bisect_left(starts, end)):
            _, string, start, stop, _ = python.tokens[i]
            other = python.tokens[i - 1].string == "." or python.text[stop : stop + 1] == "="
            if string in names and len(string) > 2 and not other and query_start(python.text, start) <= head:
                yield start, stop


# -- tasks


class Kind(NamedTuple):
    """A kind of question; each becomes a task."""

    label: str
    task_type: str  # CORE's: multiple_choice, schema (which passage stood before?) or language_modeling
    choices: int  # 1: the model has to write the answer
    few_answers: bool  # the same few answers everywhere; else each answer is used once
    find: Callable  # the places, in a text or, for Python, in a PythonText
    python: bool = False

    def examples(self, group: list[Cloze]) -> list[dict]:
        """The questions of a group with the fields of bundle.TASK_TYPES."""
        queries, answers = map(list, zip(*group, strict=True))
        if self.task_type == "language_modeling":
            return [{"context": query, "continuation": answer} for query, answer in group]
        if self.task_type == "schema":
            options = {"context_options": queries}
            return [options | {"continuation": answer, "gold": i} for i, answer in enumerate(answers)]
        return [{"query": query, "choices": answers, "gold": i} for i, query in enumerate(queries)]


KINDS = (
    Kind("continuation", "multiple_choice", 4, False, word_runs),
    Kind("beginning", "schema", 4, False, word_runs),
    Kind("repeated_word", "multiple_choice", 4, False, repeated_words),
    Kind("next_word", "language_modeling", 1, False, repeated_words),
    Kind("keyword", "multiple_choice", 4, True, keywords, python=True),
    Kind("bracket", "multiple_choice", 3, True, brackets, python=True),
    Kind("indentation", "multiple_choice", 4, True, indentations, python=True),
    Kind("argument", "multiple_choice", 4, False, arguments, python=True),
)


def make_tasks(documents: Iterable[str]) -> list[Task]:
    """The tasks for which the documents have enough places.

    The same documents give the same tasks. Only the first TEXT_CHARS characters are read.
    """
    questions: dict[Kind, list[Cloze]] = {kind: [] for kind in KINDS}
    for text in _first(documents):
        try:
            python = PythonText(text)
        except NOT_PYTHON:
            python = None
        for kind in KINDS:
            where = python if kind.python else text
            for start, end in kind.find(where) if where else ():
                questions[kind].append((text[query_start(text, start) : start], text[start:end]))
    tasks = []
    for kind in KINDS:
        examples = [example for group in _groups(kind, questions[kind]) for example in kind.examples(group)]
        if len(examples) >= FEWEST_QUESTIONS:
            random.Random(SHUFFLE_SEED).shuffle(examples)
            guessing = 0.0 if kind.choices == 1 else 100 / kind.choices  # percent
            tasks.append(Task(kind.label, kind.task_type, 0, "", round(guessing, 4), examples))
    return tasks


def _first(documents: Iterable[str]) -> Iterator[str]:
    room = TEXT_CHARS
    for text in documents:
        yield text[:room]
        room -= len(text)
        if room <= 0:
            return


def query_start(text: str, at: int) -> int:
    """Where the passage before a place begins: at the first line within QUERY_CHARS, else the first word."""
    first, last = at - QUERY_CHARS, at - QUERY_CHARS // 3
    if first <= 0:
        return 0
    line = text.find("\n", first - 1, last)
    if line >= 0:
        return line + 1
    blank = text.find(" ", first - 1, last)
    return blank + 1 if blank >= 0 else first


def _groups(kind: Kind, questions: list[Cloze]) -> list[list[Cloze]]:
    """Groups of questions that can share their choices: QUESTIONS questions, or as many as there are.

    Questions are taken in the order of their hashes: it is random, and the same for the same text.
    """

    def place(question: Cloze) -> bytes:
        return hashlib.sha256("\0".join((kind.label, *question)).encode(errors="replace")).digest()

    waiting, complete, used = [], [], set()
    for query, answer in sorted(set(questions), key=place):
        if len(query) < QUERY_CHARS // 4 or (answer in used and not kind.few_answers):
            continue
        possible = (group for group in waiting if all(_apart(kind, (query, answer), one) for one in group))
        group = next(possible, None)
        if group is None:
            if len(waiting) == OPEN_GROUPS:
                continue
            waiting.append(group := [])
        group.append((query, answer))
        used.add(answer)
        if len(group) == kind.choices:
            waiting.remove(group)
            complete.append(group)
        if len(complete) * kind.choices >= QUESTIONS:
            break
    return complete


def _apart(kind: Kind, one: Cloze, other: Cloze) -> bool:
    """Whether the answer of each question is wrong for the other one."""
    if one[1] == other[1]:
        return False
    return kind.few_answers or (one[1].strip() not in other[0] and other[1].strip() not in one[0])
