"""The picture of README.md's first screen: an all-reduce, and below it the same two halves with a step between them."""

RANKS = range(4)
COLUMN, LEFT, CELL, LINE = 152, 24, 128, 15  # pixels: from rank to rank, of the margin, of a quarter's width and height
# In hundredths of the loop: the first half travels, the step between, the second half travels, the end is looked at.
FIRST, STEP, SECOND, END = (12, 34), (38, 50), (54, 76), (80, 97)
SEEN = {  # when each class is seen
    "gradients": (0, FIRST[1]), "averages": (FIRST[1], STEP[0]), "stepped": (STEP[0], END[1]),
    "gathered": (SECOND[1], END[1]), "half": (FIRST[1], END[0]), "late": (SECOND[1], END[0]), "ends": END,
    "first": FIRST, "step": STEP, "second": SECOND, "last": END, "whole": (FIRST[0], SECOND[1]),
}
FLIES = {"out": FIRST, "back": SECOND}  # from --x to where it is drawn, seen on its way alone
STYLE = """
svg{--ink:#1c1e21;--soft:#565c66;--paper:#fff;--line:#d5d9df;--grey:#dfe2e6}
@media(prefers-color-scheme:dark){svg{--ink:#e8eaed;--soft:#a3a9b3;--paper:#15171a;--line:#3a3f47;--grey:#33383f}}
text{font:17px system-ui,sans-serif;fill:var(--ink)}.b{font-weight:700;font-size:18px}.m{text-anchor:middle}
.paper{fill:var(--paper)}.l{fill:var(--line)}.n{stroke:#0009;stroke-width:1.5}.f{opacity:0}
.c0{fill:#5db5ea}.c1{fill:#f0a93a}.c2{fill:#44bf94}.c3{fill:#e58fc0}.g{fill-opacity:.3}
.s{fill:var(--soft)}.o{fill:var(--grey)}
""".strip()


def animations():
    yield from (f".{name}{{animation:{name} 9s infinite}}" for name in (*SEEN, *FLIES))
    for name, (first, last) in SEEN.items():
        yield (f"@keyframes {name}{{0%,{first}%{{opacity:0}}{first + 0.1}%,{last}%{{opacity:1}}{last + 0.1}%,"
               f"100%{{opacity:0}}}}")
    for name, (first, last) in FLIES.items():
        there = "transform:translateX(var(--x))"
        yield (f"@keyframes {name}{{0%,{first}%{{opacity:0;{there}}}{first + 1}%{{opacity:1;{there}}}"
               f"{last - 1}%{{opacity:1;transform:none}}{last}%,100%{{opacity:0}}}}")


def quarter(rank, line, top, kind, extra=""):
    x, y, radius = LEFT + rank * COLUMN, top + line * (LINE + 3), 7 if kind.startswith("n ") else 2
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{LINE}" rx="{radius}" class="{kind} c{line}"{extra}/>'


def memory(top, is_split):
    """Four ranks' buffers of four quarters. Still: what a rank holds between the halves, or with DDP after the two.

    Quarter `line` flies to the rank that owns it, from all others; and later from there to all others.
    """
    hidden = ' opacity="0"'
    for rank in RANKS:
        for line in RANKS:
            is_own = rank == line
            yield quarter(rank, line, top, "o")
            yield quarter(rank, line, top, "g gradients", hidden)
            if is_own or not is_split:
                yield quarter(rank, line, top, "averages" if is_split else "half" if is_own else "late")
            last = "ends" if not is_split else "stepped" if is_own else "gathered"
            yield quarter(rank, line, top, f"n {last}", "" if last == "stepped" else hidden)
    for line in RANKS:
        for other in set(RANKS) - {line}:
            away = (other - line) * COLUMN
            yield quarter(line, line, top, "f out", f' style="--x:{away}px"')
            yield quarter(other, line, top, "f back", f' style="--x:{-away}px"')


def bar(x, width, top, words, kind):
    box = f'<rect x="{x}" y="{top}" width="{width}" height="26" rx="5" class='
    yield f'{box}"l"/>{box}"{kind} c2 f" fill-opacity=".5"/>'
    yield f'<text x="{x + width / 2}" y="{top + 19}" class="m">{words}</text>'


def picture():
    wide = 3 * COLUMN + CELL
    third = (wide - 110) / 2
    body = [
        f'<text x="{LEFT}" y="28" class="b">DDP: one all-reduce, then every rank updates everything</text>',
        *bar(LEFT, wide - 110, 40, "all-reduce", "whole"), *bar(LEFT + wide - 104, 104, 40, "update all", "last"),
        *memory(78, False),
        f'<text x="{LEFT}" y="190" class="b">Here: its two halves, and the update between them</text>',
        *bar(LEFT, third, 202, "reduce-scatter", "first"), *bar(LEFT + third + 6, 98, 202, "update 1/d", "step"),
        *bar(LEFT + third + 110, third, 202, "all-gather", "second"),
        *memory(240, True),
        *(f'<text x="{LEFT + rank * COLUMN + CELL / 2}" y="330" class="m s">rank {rank}</text>' for rank in RANKS),
        f'<text x="{LEFT}" y="358" class="s">The same bytes. Pale: gradients. Full: averages. Round: updated.</text>',
    ]
    title = "An all-reduce, and its two halves with the update between them: the same bytes, a quarter of the state"
    style = f"{STYLE}@media(prefers-reduced-motion:no-preference){{{''.join(animations())}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 2 * LEFT} 372" width="{wide + 2 * LEFT}" '
        f'role="img"><title>{title}</title><style>{style}</style><rect width="100%" height="100%" class="paper"/>\n'
        + "\n".join(body) + "\n</svg>\n"
    )
