"""What a parameter costs a rank in 16 bits, stacked: by formula, as chapter 3 spells it out."""

from html import escape

D = 8  # ranks of the picture
PARTS = [("parameter", "#4a90d9"), ("gradient", "#3a9d5d"), ("main parameter", "#b04a9d"),
         ("main gradient", "#d9822b"), ("two moments", "#c9a227")]
# Bytes of each part: (on every rank, in shards).
BARS = [("DDP, bf16/bf16", [(2, 0), (2, 0), (4, 0), (4, 0), (8, 0)]),
        ("DDP, bf16/fp32", [(2, 0), (4, 0), (4, 0), (0, 0), (8, 0)]),
        ("stage 3, bf16/bf16", [(2, 0), (2, 0), (0, 4), (0, 4), (0, 8)]),
        ("stage 3, bf16/fp32", [(2, 0), (4, 0), (0, 4), (0, 0), (0, 8)])]
LEFT, UNIT, HIGH, GAP = 136, 26, 18, 8  # pixels; a byte is UNIT wide


def picture():
    out = [f'<text y="14" class="title">Bytes of a parameter on each of {D} ranks</text>']
    for number, (name, parts) in enumerate(BARS):
        x, y = LEFT, 26 + number * (HIGH + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for (whole, shared), (_, colour) in zip(parts, PARTS):
            wide = UNIT * (whole + shared / D)
            if wide:
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" height="{HIGH}" style="fill:{colour}"/>')
            x += wide
        total = sum(whole + shared / D for whole, shared in parts)
        out.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{total:g}</text>')
    x, y = LEFT, 26 + len(BARS) * (HIGH + GAP) + 8
    for name, colour in PARTS:
        out.append(f'<rect x="{x}" y="{y}" width="11" height="11" style="fill:{colour}"/>'
                   f'<text x="{x + 15}" y="{y + 10}">{name}</text>')
        x += 30 + 7 * len(name)
    size = f'viewBox="0 0 720 {y + 20}" width="720" height="{y + 20}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>16 bits as a sum</title>'
                      "<style>.title{font-weight:bold} text{font:12px sans-serif;fill:#777}</style>", *out, "</svg>\n"])
