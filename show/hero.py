"""The picture of README.md's first screen: an all-reduce, and below it the same two halves with a step between them."""

RANKS = range(4)
COLUMN, LEFT, CELL, LINE = 152, 24, 128, 15  # pixels: from rank to rank, of the margin, of a quarter's width and height
SECONDS = 9
# In hundredths of the loop: the first half travels, the step between, the second half travels, the end is looked at.
FIRST, STEP, SECOND, END = (12, 34), (38, 50), (54, 76), (80, 97)
STYLE = """
svg{--ink:#1c1e21;--soft:#565c66;--paper:#fff;--line:#d5d9df;--grey:#dfe2e6}
@media(prefers-color-scheme:dark){svg{--ink:#e8eaed;--soft:#a3a9b3;--paper:#15171a;--line:#3a3f47;--grey:#33383f}}
text{font:17px system-ui,sans-serif;fill:var(--ink)}.b{font-weight:700;font-size:18px}.m{text-anchor:middle}
.paper{fill:var(--paper)}.o{fill:var(--grey)}.l{fill:var(--line)}.n{stroke:#0009;stroke-width:1.5}.f{opacity:0}
.c0{fill:#5db5ea}.c1{fill:#f0a93a}.c2{fill:#44bf94}.c3{fill:#e58fc0}.g{fill-opacity:.3}.s{fill:var(--soft)}
.d{fill:#111}
"""


def keyframes(name, first, last, inside, outside):
    """An animation that is `inside` from `first` to `last`, in hundredths, and `outside` else."""
    keys = f"0%,{first}%{{{outside}}}{first + 0.1}%,{last}%{{{inside}}}{last + 0.1}%,100%{{{outside}}}"
    return f"@keyframes {name}{{{keys}}}.{name}{{animation:{name} {SECONDS}s infinite}}"


def flight(dx, first, last):
    """-> name and rule of what flies from `dx` pixels away to where it is drawn, and is seen on its way alone."""
    name = f"x{first}{'m' if dx < 0 else 'p'}{abs(dx)}"
    away = f"transform:translateX({dx}px)"
    return name, (
        f"@keyframes {name}{{0%,{first}%{{opacity:0;{away}}}{first + 1}%{{opacity:1;{away}}}"
        f"{last - 1}%{{opacity:1;transform:none}}{last}%,100%{{opacity:0}}}}"
        f".{name}{{animation:{name} {SECONDS}s infinite}}"
    )


def quarter(rank, line, top, kind, extra=""):
    radius = 7 if "n" in kind.split() else 2
    x, y = LEFT + rank * COLUMN, top + line * (LINE + 3)
    return f'<rect x="{x}" y="{y}" width="{CELL}" height="{LINE}" rx="{radius}" class="{kind}"{extra}/>'


def flights(top, rules):
    """Quarter `line` goes to the rank that owns it, from all others; and later from there to all others."""
    out = []
    for line in RANKS:
        for other in RANKS:
            if other != line:
                for at, dx, (first, last) in ((line, other - line, FIRST), (other, line - other, SECOND)):
                    name, rules[name] = flight(dx * COLUMN, first, last)
                    out.append(quarter(at, line, top, f"f c{line} {name}"))
    return out


def memory(top, is_split):
    """Four ranks' buffers of four quarters. Still: what a rank holds between the halves, or with DDP after the two."""
    out = []
    for rank in RANKS:
        for line in RANKS:
            own, colour = rank == line, f"c{line}"
            out.append(quarter(rank, line, top, "o"))
            out.append(quarter(rank, line, top, f"{colour} g gradients", ' opacity="0"'))
            if own or not is_split:
                name = "averages" if is_split else "half" if own else "late"
                out.append(quarter(rank, line, top, f"{colour} {name}"))
            kind = "n stepped" if own and is_split else "n gathered" if is_split else "n ends"
            still = "" if own and is_split else ' opacity="0"'
            out.append(quarter(rank, line, top, f"{colour} {kind}", still))
    return out


def bar(x, width, top, words, kind):
    return (
        f'<rect x="{x}" y="{top}" width="{width}" height="26" rx="5" class="l"/>'
        f'<rect x="{x}" y="{top}" width="{width}" height="26" rx="5" class="{kind} c2 f" fill-opacity=".5"/>'
        f'<text x="{x + width / 2}" y="{top + 19}" class="m">{words}</text>'
    )


def picture():
    rules, wide = {}, 3 * COLUMN + CELL
    seen, hidden = "opacity:1", "opacity:0"
    spans = {
        "gradients": (0, FIRST[1]), "averages": (FIRST[1], STEP[0]), "stepped": (STEP[0], END[1]),
        "gathered": (SECOND[1], END[1]), "half": (FIRST[1], END[0]), "late": (SECOND[1], END[0]), "ends": END,
        "first": FIRST, "step": STEP, "second": SECOND, "last": END,
    }
    for name, (first, last) in spans.items():
        rules[name] = keyframes(name, first, last, seen, hidden)
    rules["whole"] = keyframes("whole", FIRST[0], SECOND[1], seen, hidden)
    third = (wide - 110) / 2
    body = [
        f'<text x="{LEFT}" y="28" class="b">DDP: one all-reduce, then every rank updates everything</text>',
        bar(LEFT, wide - 110, 40, "all-reduce", "whole"), bar(LEFT + wide - 104, 104, 40, "update all", "last"),
        *memory(78, False), *flights(78, rules),
        f'<text x="{LEFT}" y="190" class="b">Here: its two halves, and the update between them</text>',
        bar(LEFT, third, 202, "reduce-scatter", "first"), bar(LEFT + third + 6, 98, 202, "update 1/d", "step"),
        bar(LEFT + third + 110, third, 202, "all-gather", "second"),
        *memory(240, True), *flights(240, rules),
        *(f'<text x="{LEFT + rank * COLUMN + CELL / 2}" y="330" class="m s">rank {rank}</text>' for rank in RANKS),
        f'<text x="{LEFT}" y="358" class="s">The same bytes. Pale: gradients. Full: averages. Round: updated.</text>',
    ]
    title = "An all-reduce, and its two halves with the update between them: the same bytes, a quarter of the state"
    style = STYLE.strip() + "@media(prefers-reduced-motion:no-preference){" + "".join(rules.values()) + "}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 2 * LEFT} 372" width="{wide + 2 * LEFT}" '
        f'role="img"><title>{title}</title><style>{style}</style><rect width="100%" height="100%" class="paper"/>\n'
        + "\n".join(body) + "\n</svg>\n"
    )
