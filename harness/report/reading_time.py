"""What takes how long to read: words of a page, code lines of a file."""

import ast
import io
import re
import tokenize

WORDS_A_MINUTE, CODE_LINES_A_MINUTE = 200, 5
CORE = ("optimizer.py", "buffer.py", "transport.py")


def words(text):
    return len(text.split())


def code_lines(path):
    """-> number -> text of the lines of a Python file that are code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    found, no_code = set(), (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
                             tokenize.ENCODING, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            found -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return {number: lines[number - 1].split("  #")[0] for number in sorted(found)}


def core_lines(folder):
    """Code lines of a stage's core."""
    return sum(len(code_lines(folder / name)) for name in CORE if (folder / name).exists())


def minutes(page, folder=None):
    """To read a page, its generated tables aside, and the core in `folder`."""
    text = re.sub(r"(<!-- report: \w+ -->\n).*?(<!-- end -->)", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return words(text) / WORDS_A_MINUTE + (core_lines(folder) / CODE_LINES_A_MINUTE if folder else 0)
