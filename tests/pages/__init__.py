"""A page of markdown in parts, read by markdown-it, which rich brings."""

import itertools
import re

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from tests.ranks import ROOT

PROGRAMS = "make", "torchrun", "python", "python3", ".venv/bin/python", "pip", "cp", "cd", "git", "source", "export"


class Page:
    """`blocks`: (first line, language, code); `spans`: (line, `code`) in prose; `links`: (line, target); `rows`: (line,
    cells) of tables; `html`: (line, block of HTML); `anchors`: what #… may name; `n_words`: outside of code, tables,
    and what is generated."""

    def __init__(self, name, text=None):
        self.name, self.path = name, ROOT / name
        self.text = self.path.read_text(encoding="utf-8") if text is None else text
        self.blocks, self.spans, self.links, self.rows, self.html = [], [], [], [], []
        self.anchors, self.n_words = set(), 0
        line, is_generated = 1, False
        for node in SyntaxTreeNode(MarkdownIt("commonmark").enable("table").parse(self.text)).walk(include_self=False):
            line = node.map[0] + 1 if node.map else line
            if node.type in ("fence", "code_block"):
                self.blocks.append((line + (node.type == "fence"), node.info, node.content))
            elif node.type == "html_block":
                self.html.append((line, node.content))
                is_generated = "<!-- report:" in node.content or is_generated and "<!-- end" not in node.content
            elif node.type == "heading":  # its anchor as GitHub makes it
                self.anchors.add(re.sub(r"[^\w\- ]", "", node.children[0].content.lower()).replace(" ", "-"))
            elif node.type == "tr":
                self.rows.append((line, [cell.children[0].content for cell in node.children]))
            elif node.type == "code_inline":
                self.spans.append((line, " ".join(node.content.split())))
            elif node.type in ("link", "image"):
                self.links.append((line, node.attrs.get("href", node.attrs.get("src"))))
            elif node.type == "inline" and node.parent.type not in ("th", "td") and not is_generated:
                self.n_words += len(node.content.split())

    def code(self, language="python"):
        """-> the blocks of code in that language."""
        return [code for _, of_block, code in self.blocks if of_block == language]

    def commands(self):
        """-> (line, what a reader types), in blocks and in prose."""
        lines = [(first + at, line) for first, language, code in self.blocks if language in ("", "text")
                 for at, line in enumerate(re.sub(r"\\\n *", "", code).splitlines())]
        return [(line, text) for line, text in lines + self.spans if program_of(text)]


def program_of(line):
    """-> the words of a command from its program on, without `sudo` and variables; [] of what is no command."""
    words = list(itertools.dropwhile(lambda word: re.fullmatch("sudo|[A-Z_]+=.*", word), line.split()))
    is_command = len(words) > 1 and words[0] in PROGRAMS and not line.startswith(" ")
    return words if is_command else []


PAGES = [Page(path.relative_to(ROOT).as_posix()) for pattern in ("*.md", "*/*.md") for path in ROOT.glob(pattern)]
