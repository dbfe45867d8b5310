"""
Find the lines that a reader has to decode, and count what a file weighs.

python tests/tools/plain.py FILE... prints the finds and the weight of each file: its tokens (names,
operators, numbers, strings). Shorter names or joined lines do not change the weight, comments and
docstrings hardly do.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TRUTHS = {"bool", "any", "all", "startswith", "endswith", "exists", "is_file", "is_dir", "isin"}
LAMBDA = 25  # nodes of a lambda that needs no name


def weight(text):
    """Return the number of tokens of a file; an f-string is one, as before Python 3.12."""
    count = 0
    depth = 0  # of f-strings
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_END":
            depth -= 1
        elif depth == 0 and (token.type in COUNTED or name == "FSTRING_START"):
            count += 1
        if name == "FSTRING_START":
            depth += 1
    return count


def called(node):
    """Return the name of the function or method that a node calls, "" for other nodes."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", None) or getattr(node.func, "attr", "")


def is_truth(node):
    """Return whether an expression is a truth value by its form."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, (ast.Compare, ast.BoolOp)) or called(node) in TRUTHS


def is_sequence(node):
    """Return whether an expression is a text or a list by its form."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, (ast.List, ast.JoinedStr))


def names_in(node):
    """Return the names that occur in a node."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def find_assignment(node):
    """a, b = x, y: unless one needs the other, as in a swap."""
    target = node.targets[0]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        if len(target.elts) > 1 and not names_in(target) & names_in(node.value):
            yield "several assignments in one"


def find_product(node):
    """A text or a list times a truth value, or times something that may be one."""
    if isinstance(node.op, ast.Mult):
        if is_truth(node.left) or is_truth(node.right):
            if is_sequence(node.left) or is_sequence(node.right):
                yield "times a truth value: write an if"
        elif is_sequence(node.left) and called(node.right) != "len":
            if not isinstance(node.right, (ast.Constant, ast.BinOp)):
                yield "a text or list times a truth value: write an if"


def find_starred(node):
    """*filter(None, [...])"""
    if called(node.value) == "filter":
        yield "*filter(...): build the list with an if"


def find_loop(node):
    """for x in items if flag else ()"""
    if isinstance(node.iter, ast.IfExp):
        yield "a loop used as an if"


def find_comprehension(node):
    """Comprehensions in comprehensions, and iterators that are used up in one."""
    parts = list(ast.walk(node))
    inner = [part for part in parts if isinstance(part, COMPREHENSIONS)]
    if len(inner) > 2 or len(node.generators) > 2:
        yield "comprehensions in comprehensions"
    if "next" in map(called, parts):
        yield "next() in a comprehension"


def find_lambda(node):
    """A lambda that wants a name."""
    if len(list(ast.walk(node))) > LAMBDA:
        yield "a long lambda: give it a name"


FINDERS = {
    ast.Assign: find_assignment,
    ast.BinOp: find_product,
    ast.Starred: find_starred,
    ast.For: find_loop,
    ast.comprehension: find_loop,
    ast.Lambda: find_lambda,
    **dict.fromkeys(COMPREHENSIONS, find_comprehension),
}


def finds_in(text):
    """Return (line, what) of all finds in a file."""
    finds = set()
    for node in ast.walk(ast.parse(text)):
        if type(node) in FINDERS:
            line = getattr(node, "lineno", None) or node.iter.lineno
            finds |= {(line, what) for what in FINDERS[type(node)](node)}
    return sorted(finds)


def main(paths):
    finds = 0
    for path in paths:
        text = Path(path).read_text(encoding="utf-8")
        for line, what in finds_in(text):
            print(f"{path}:{line}: {what}")
            finds += 1
        print(f"{path}: {weight(text)} tokens")
    return finds > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
