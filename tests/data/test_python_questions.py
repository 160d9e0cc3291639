"""Conversations made from the running Python's library: right, held out by function, always the same."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from nanochat import UserError
from nanochat.data.chat_format import ConversationData, Conversations
from nanochat.data.python_functions import read_functions
from nanochat.data.python_questions import open_embedded
from nanochat.evals.exact_match import exact_match_questions


@pytest.fixture(scope="module")
def data():
    return open_embedded()


def turns(split):
    """(question, answer) of all turns; a follow-up question gets the code of the first one."""
    for messages in split.messages:
        spoken = [content for role, content in messages if role != "system"]
        code = code_in(spoken[0])
        for question, answer in zip(spoken[::2], spoken[1::2], strict=True):
            yield question, answer, code


def code_in(question):
    """The def or class statement in a question, as one line."""
    found = re.search(r"((class \w+:\n    )?def \w+\(.*?\)):(\n|$)", question, re.DOTALL)
    return found.group(1) + ": pass" if found else ""


def arguments(code):
    """(names in order, {name: text of the default}, whether some are keyword-only), by the parser."""
    node = ast.parse(code).body[0]
    a = node.args
    plain, kwonly = [*a.posonlyargs, *a.args], a.kwonlyargs
    names = [x.arg for x in (*plain, *filter(None, [a.vararg]), *kwonly, *filter(None, [a.kwarg]))]
    defaults = dict(zip([x.arg for x in plain][::-1], map(ast.unparse, a.defaults[::-1]), strict=False))
    defaults |= {x.arg: ast.unparse(d) for x, d in zip(kwonly, a.kw_defaults, strict=True) if d}
    return node.name, names, defaults, bool(kwonly)


def expected(question, answer, code):
    """Answers that are right, worked out from the question's code once more; it is one of them if it has one
    of these forms."""
    name, names, defaults, keyword_only = arguments(code)
    words = set(re.findall(r"\w+", question.replace(code.removesuffix(" pass"), "")))
    plural = "s" if len(names) > 1 else ""
    takes = "Yes, {} takes keyword-only" if keyword_only else "No, {} takes no keyword-only"
    return {
        "The first parameter is ": {f"The first parameter is {names[0]}."},
        "The last parameter is ": {f"The last parameter is {names[-1]}."},
        "After ": {f"After {a} comes {b}." for a, b in pairwise(names) if a in words},
        "By default, ": {f"By default, {p}={d}." for p, d in defaults.items() if p in words},
        f"The function {name} has ": {f"The function {name} has {len(names)} parameter{plural}."},
        f"Yes, {name} has ": {f"Yes, {name} has a parameter {p}." for p in words & set(names)},
        f"No, {name} has ": {f"No, {name} has no parameter {p}." for p in words - set(names)},
        f"Yes, {name} takes ": {f"{takes.format(name)} arguments."},
        f"No, {name} takes ": {f"{takes.format(name)} arguments."},
        "The call is ": {f"The call is {name}({', '.join(names)})."},
        "The function is ": {f"The function is {name}."},
    }


def test_every_answer_about_a_signature_is_right(data):
    counts = Counter()
    for split in (data.train, data.val):
        for question, answer, code in turns(split):
            if code.startswith("def"):
                for number, (beginning, right) in enumerate(expected(question, answer, code).items()):
                    if answer.startswith(beginning):
                        assert answer in right, (question, answer)
                        counts[number] += 1
    assert len(counts) == 11 and min(counts.values()) > 50


def test_every_answer_about_a_class_or_an_import_is_right(data):
    seen = Counter()
    for question, answer, _ in turns(data.train):
        last = answer.rstrip(".").split()[-1]
        if found := re.match(r"The method (\w+) belongs to ", answer):
            assert f"class {last}:\n    def {found[1]}(self" in question
        elif found := re.match("It imports (from|the name) ", answer):
            word = "from" if found[1] == "from" else "import"
            assert re.search(rf"(?<!\w){word} {re.escape(last)}(\s|$)", question), (question, answer)
        seen[found and found[0].split()[1]] += 1
    assert seen["method"] > 100 and seen["imports"] > 300


def test_every_answer_to_a_computation_is_what_python_computes(data):
    printed = evaluated = 0
    for split in (data.train, data.val):
        for question, answer, _ in turns(split):
            if answer.startswith("It prints "):
                values = dict(re.findall(r"(\w+) = '?(\w+)'?", question))
                variable = re.search(r"print\((\w+)\)", question)[1]
                assert answer == f"It prints {values[variable]}."
                printed += 1
            elif answer.startswith("The value is "):
                expression = re.search(r"([\[{]|(len|max|sorted)\().*[\])]", question)[0]
                assert answer == f"The value is {eval(expression)!r}."
                evaluated += 1
    assert printed > 300 and evaluated > 1500


def test_every_sum_of_two_digits_is_right_and_in_training_alone(data):
    taught = {}
    for question, answer, _ in turns(data.train):
        if found := re.fullmatch(r"(\d) \+ (\d) = (\d+)\.", answer):
            a, b, c = map(int, found.groups())
            assert a + b == c and re.findall(r"\d+", question) == [str(a), str(b)], question
            taught.setdefault((a, b), set()).add(question)
    assert len(taught) == 100 and "What is 7 + 5?" in taught[7, 5]
    held_out = " ".join(answer for _, answer, _ in turns(data.val))
    assert not re.search(r"\d \+ \d", held_out)


def test_no_function_and_no_word_of_a_computation_is_in_both_splits(data):
    names, words = [], []
    for split in (data.train, data.val):
        asked = [question for question, _, _ in turns(split)]
        named = (
            r"def (\w+)\(",
            r"^from \S+ import (\w+)",
            r"^(?:What does|What is|Explain) (?:\w+\.)+(\w+) (?:do|for|in one sentence)[.?]$",
        )
        text = "\n".join(asked)
        names.append({name for pattern in named for name in re.findall(pattern, text, re.M)})
        computed = [q for q, answer, _ in turns(split) if answer.startswith(("It prints ", "The value "))]
        words.append({word for question in computed for word in re.findall(r"'(\w{2,})'", question)})
    assert min(map(len, names)) > 100 and min(map(len, words)) > 50
    assert not names[0] & names[1]
    assert not words[0] & words[1]


def test_a_question_is_the_same_in_another_process_with_other_hashes(tmp_path):
    source = "def pay(price, currency='EUR'):\n    'Pay it.'\ndef send(*, to): pass\n"
    (tmp_path / "shop.py").write_text(source)
    code = "import pathlib, sys; from nanochat.data.python_questions import open_embedded; "
    code += "print(open_embedded(pathlib.Path(sys.argv[1])).fingerprint)"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.check_output([sys.executable, "-c", code, tmp_path], env=environment, text=True)
        assert said == f"{open_embedded(tmp_path).fingerprint}\n"


def test_sources_are_read_and_never_run(tmp_path):
    (tmp_path / "loud.py").write_text("raise SystemExit('was run')\ndef f(a, b=2):\n    pass\n")
    (tmp_path / "broken.py").write_text("def g(:\n")
    (tmp_path / "latin.py").write_bytes(b"def h(a):\n    '\xe9'\n")
    (tmp_path / "this.py").write_text("def i(a): pass\n")
    (tmp_path / "_private.py").write_text("def j(a): pass\n")
    (tmp_path / "empty.py").mkdir()
    assert [function.qualified_name for function in read_functions(tmp_path)] == ["loud.f"]
    (tmp_path / "loud.py").unlink()
    with pytest.raises(UserError, match=r"no source files .* --data=PATH"):
        open_embedded(tmp_path / "empty.py")


def test_a_function_whose_parameters_the_text_does_not_tell_is_left_out(tmp_path):
    (tmp_path / "m.py").write_text(
        "def a(x=time.time()): pass\n"
        "def b(x=set()): pass\n"
        "def c(x=(set(),)): pass\n"
        "@wraps(a)\ndef d(x): pass\n"
        "def _e(x): pass\n"
        "def f(): pass\n"
        "def h(x=...): pass\n"
        "class K:\n"
        "    def g(self, x: int, /, *y, z: str = 'q', **w) -> None:\n        'Give all that you have. Now.'\n"
        "    @staticmethod\n    def s(x): pass\n"
        "    @property\n    def p(self, x): pass\n"
    )
    found = {function.name: function for function in read_functions(tmp_path)}
    assert list(found) == ["g", "s"]
    assert found["g"].parameters == ("x", "/", "*y", "z='q'", "**w")
    assert (found["g"].bound, found["s"].bound) == ("self", "")
    assert found["g"].summary == "Give all that you have."


def test_the_answer_of_the_most_similar_training_question_is_seldom_right(data):
    questions = exact_match_questions(data, 60)
    assert exact_match_questions(data, 20) == questions[:20]
    known = [(set(re.findall(r"\w+", question)), answer) for question, answer, _ in turns(data.train)]
    right = 0
    for messages, answer in questions:
        words = set(re.findall(r"\w+", messages[-1][1]))
        right += answer == max(known, key=lambda pair: len(words & pair[0]) / len(words | pair[0]))[1]
    assert 0 < right / len(questions) < 0.25


def one(question, answer, *before):
    return (*before, ("user", question), ("assistant", answer))


def test_questions_of_any_conversations_can_be_measured():
    split = Conversations(
        [one("a?", "A"), one("b?", "B", ("system", "short")), one("d?", "D", *one("c?", "C"))], [1.0] * 3
    )
    questions = exact_match_questions(ConversationData("mine", split, split, ""), 10)
    assert sorted(answer for _, answer in questions) == ["A", "B", "C"]
