"""A page of markdown, cut up: blocks, prose, spans of code, links, commands."""

import re
from typing import NamedTuple


class Block(NamedTuple):
    """Of a page: code in a fence, or indented by 4. `line`: where it begins; `language`: as the fence says, or ""."""
    line: int
    language: str
    lines: list


class Command(NamedTuple):
    """A line that a reader types. `shown`: what the page says that it prints; [] if it doesn't."""
    line: int
    text: str
    shown: list


class Page:
    """A markdown file, cut up.

    Attributes:
        path, name: the file; as it is called from the project's root.
        blocks: list of Block.
        prose: the text without blocks; as many lines as the file has.
    """

    def __init__(self, path, root):
        self.path, self.root, self.name = path, root, path.relative_to(root).as_posix()
        self.text = path.read_text(encoding="utf-8")
        self.blocks, prose, block, fence, is_after_blank = [], [], None, None, True
        for number, line in enumerate(self.text.splitlines(), start=1):
            mark = re.match(r" {0,3}(`{3,}|~{3,}) *(\w*)", line)
            if fence:
                if mark and mark[1].startswith(fence) and not mark[2]:
                    fence = block = None
                else:
                    block.lines.append(line)
            elif mark:
                fence, block = mark[1], Block(number + 1, mark[2], [])
                self.blocks.append(block)
            elif line.startswith("    ") and (is_after_blank or block):
                if block is None:
                    block = Block(number, "", [])
                    self.blocks.append(block)
                block.lines.append(line[4:])
            elif block and not line.strip():
                block.lines.append("")
            else:
                block = None
                prose.extend([""] * (number - 1 - len(prose)) + [line])
            is_after_blank = not line.strip()
        self.prose = "\n".join(prose)

    def line_at(self, offset):
        return self.prose.count("\n", 0, offset) + 1

    def spans(self):
        """-> (line, text) of each `code` in the prose; one that is broken over two lines is one."""
        for match in re.finditer(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", self.prose, re.DOTALL):
            if "\n\n" not in match[2]:
                yield self.line_at(match.start()), " ".join(match[2].split())

    def links(self):
        """-> (line, target) of links, pictures, and HTML's src and href."""
        without_code = re.sub(r"`[^`\n]*`", lambda span: "`" + "." * (len(span[0]) - 2) + "`", self.prose)
        for pattern in (r"\]\(<?([^)\s>]+)>?(?: [^)]*)?\)", r"^ {0,3}\[[^\]]+\]: *(\S+)",
                        r"(?:src|href|srcset)=\"([^\"]+)\""):
            for match in re.finditer(pattern, without_code, re.MULTILINE):
                yield self.line_at(match.start()), match[1]

    def anchors(self):
        """What #… may name: headings, as GitHub writes them, and HTML's ids."""
        found = set(re.findall(r"(?:id|name)=\"([^\"]+)\"", self.prose))
        for heading in re.findall(r"^#{1,6} +(.+?) *#*$", self.prose, re.MULTILINE):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(next(name for name in (slug, *(f"{slug}-{i}" for i in range(1, 100))) if name not in found))
        return found

    def commands(self):
        """-> Commands, of blocks and of spans."""
        for block in self.blocks:
            if block.language in ("", "text", *SHELLS):
                yield from commands_of(block)
        for line, span in self.spans():
            if len(span.split()) > 1 and program_of(span) in PROGRAMS:
                yield Command(line, span, [])


SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = ("make", "torchrun", "python", "python3", ".venv/bin/python", "pip", "cp", "cd", "git", ".", "source",
            "export")


def program_of(text):
    """The first word of a command, behind variables that are set for it."""
    return next((word for word in text.split() if word != "sudo" and not re.match(r"[A-Z_]+=", word)), "")


def commands_of(block):
    lines = [(block.line + i, line) for i, line in enumerate(block.lines)]
    shows_output = any(line.startswith("$ ") for _, line in lines)
    number, text, shown = None, "", []
    for at, line in lines:
        if text.endswith("\\"):
            text = f"{text[:-1].rstrip()} {line.strip()}"
        elif line.startswith("$ ") if shows_output else _is_command(line, block.language):
            if number:
                yield Command(number, text, shown)
            number, text, shown = at, re.sub(r"\s+#\s.*", "", line.removeprefix("$ ").strip()), []
        elif shows_output and number:
            shown.append(line)
    if number:
        yield Command(number, text, shown)


def _is_command(line, language):
    if language in SHELLS:
        return bool(line.strip()) and not line.lstrip().startswith("#")
    return not line.startswith(" ") and program_of(line) in PROGRAMS and len(line.split()) > 1
