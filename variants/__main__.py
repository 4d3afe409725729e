"""What each variant sends and holds, counted on one rank of eight whose messages go nowhere; and what was measured.

    python -m variants [--page]

--page puts the tables into README.md, where there is a comment for each.
"""

import functools
from operator import itemgetter
from pathlib import Path
from unittest import mock

from harness import FOUR, THREE, command_line

if __name__ == "__main__":
    command_line.begin()

import torch

from harness import results as saved
from harness import rows as catalogue
from harness.alone import rank_0_of
from harness.examine import Settings, adamw
from harness.gpt import GPT, MODELS
from harness.ledger import Ledger
from harness.memory import Memory
from harness.pages import rewritten
from harness.tables import column, markdown, names, rate_words, sheet_of
from harness.take import code_lines, core_lines
from stage4_overlap.transport import GlooTransport, Transport
from variants.muon import UNEVEN, owners
from variants.muon_rows import MUON

PAGE = Path(__file__).with_name("README.md")
STAGE_3, STAGE_4, BF16 = catalogue.GRAD_BUFFER, catalogue.OVERLAP, catalogue.OVERLAP_BF16
ROWS = {  # a row of the bench -> the row that it is compared with, what it is called elsewhere, when to take it
    STAGE_3: (None, "", "the base of the next row"),
    "variants per_parameter": (STAGE_3, "modded-nanogpt, nanochat", "few, large parameters"),
    STAGE_4: (None, "", "the base of all that follow"),
    "variants muon": ("ddp + muon", "Megatron-LM's layer-wise optimizer, Owned of torchtitan", "Muon, SOAP, Shampoo"),
    "variants hybrid": (STAGE_4, "num_distributed_optimizer_instances, HSDP",
                        "slow links between nodes, or latency decides"),
    "variants wire16": (STAGE_4, "bf16_compress_hook, communication_data_type", "the link decides"),
    "variants moments16": (STAGE_4, "use_precision_aware_optimizer", "the state decides, beta2 ≤ 0.99"),
    "variants same_bits": (STAGE_4, "–", "the bits must not depend on the number of ranks"),
    "variants finite": (STAGE_4, "check_for_nan_in_grad", "which rank has the nan?"),
    "variants blocks": (STAGE_4, "torchao with FSDP2", "8-bit states"),
    "variants offload": (STAGE_4, "offload_optimizer, CPUOffloadPolicy", "the GPU's memory decides"),
    BF16: (None, "", "the base of the next row"),
    "variants remainder16": (BF16, "store_param_remainders", "bf16, and no fp32 copies"),
}
MUONS = {"ddp + muon": "replicated, DDP", "stage 2 muon": "stage 2", "muon stacked by shape": "a stack a shape",
         "variants muon": "muon"}
GPTS = {"GPT-2, 124M": (12, 768), "GPT-2, 1.5B": (48, 1600), "GPT, 7B": (32, 4096)}  # layers, width


@functools.cache
def counted(name, d=8):
    """-> (bytes a parameter sent, messages, bytes a parameter held without bucket buffers; and both by formula)."""
    configuration = catalogue.find(name)
    exchanged = mock.patch.dict(UNEVEN, {Transport: GlooTransport})  # the fake group gathers equal parts alone
    # Without the rounds of Newton–Schulz, which take minutes where a CPU has no bf16: the counts don't depend on them.
    no_rounds = mock.patch.dict(MUON, ns_steps=0)
    with rank_0_of(d), exchanged, no_rounds, Memory("cpu") as memory:
        net = GPT(MODELS["tiny"]).to(getattr(torch, configuration.dtype))
        training = configuration.build(net, adamw(Settings(model="tiny")))
        for _ in range(3):
            with Ledger() as ledger:
                training.step(torch.zeros(2, 1, 8, dtype=torch.int64))
                training.finish()
        pair = getattr(training.optimizer, "optimizers", [training.optimizer])
        numel = sum(param.numel() for param in net.parameters())
        buffers = sum(getattr(optimizer, "bucket_buffer_bytes", 0) for optimizer in pair) / numel
        expected = configuration.bytes_per_param(numel, d, training.optimizer) - buffers
        return (ledger.wire_bytes / numel, len(ledger.entries), memory.settled() / numel - buffers,
                configuration.wire_bytes(numel, d) / numel, expected)


def saved_in(*files):
    """-> what results/ has of these names."""
    return [saved.load(file) for file in files if (saved.ROOT / "results" / file).exists()]


def measured(kind="variants"):
    """-> {where: what was measured there, a Result}"""
    files = saved_in(f"bench_{kind}.json", f"network_{kind}.json")
    return {rate_words(result.conditions.rate) if result.conditions.rate else "one machine": result
            for file in files for result in file.at_all_rates()}


def time_cell(name, base, result):
    """Of a base milliseconds a step, of a variant how many times its base takes, round by round."""
    own, other = result and result.timed(name), result and result.timed(base or name)
    return own and other and (f"× {own.over(other):.2f}" if base else f"{own.median_ms:.0f} ms")


def table():
    places = measured()
    of_own = {f"variants {kind}": measured(kind) for kind in ("muon", "hybrid")}  # beside other rows, on other ranks

    def lines(name):
        idea = PAGE.with_name(f"{name.removeprefix('variants ')}.py")
        stage = THREE if name == STAGE_3 else FOUR
        return len(code_lines(idea)) if idea.exists() else core_lines(saved.ROOT / stage)

    def time(place):
        return lambda name: time_cell(name, ROWS[name][0], of_own.get(name, places).get(place))
    return sheet_of("", ROWS, {
        "idea": names(lambda name: name.removeprefix("variants "), "idea"), "lines": column("lines", lines, "counted"),
        "elsewhere": names(lambda name: ROWS[name][1], "called elsewhere"),
        "sent": column("sent", lambda name: counted(name)[0], "counted", ".2f"),
        "messages": column("messages", lambda name: counted(name)[1], "counted"),
        "held": column("held", lambda name: counted(name)[2], "counted", ".2f"),
        **{f"time, {place}": column(f"time, {place}", time(place), "measured") for place in places},
        "when": names(lambda name: ROWS[name][2], "take it when")})


def balance(layers, width, d):
    """Newton–Schulz of the rank with most over the mean: of muon, and where each shape is a stack, 1/d on each rank."""
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    work = {shape: shape[0] * shape[1] * min(shape) for shape in shapes}
    of_rank, mean = [0] * d, layers * sum(work.values()) / d
    matrices = [torch.empty(shape, device="meta") for _ in range(layers) for shape in shapes]
    for matrix, owner in owners([{"params": matrices}], d).items():
        of_rank[owner] += work[tuple(matrix.shape)]
    return max(of_rank) / mean, max(1, max(work.values()) / mean), -(-layers // d) * sum(work.values()) / mean


def balance_table():
    rows = [(name, d, *balance(*of, d)) for name, of in GPTS.items() for d in (2, 8, 64)]
    works = {name: column(name, itemgetter(at), "counted", ".2f")
             for at, name in enumerate(("muon", "at least", "a stack a shape"), start=2)}
    return sheet_of("", rows, {
        "model": names(itemgetter(0), "model"), "d": column("d", itemgetter(1), "counted"), **works})


def muon_table():
    """DDP's reducer doesn't run in the fake group: what it sends is its formula, and nobody counts what it holds."""
    def of(at, d):
        replicated = 8 * (d - 1) / d, None, None
        return lambda name: (replicated if name == "ddp + muon" else counted(name, d))[at]
    return sheet_of("", MUONS, {
        "name": names(MUONS.get, "matrices by Muon"), "sent 8": column("sent, d = 8", of(0, 8), "counted", ".2f"),
        "sent 64": column("64", of(0, 64), "counted", ".2f"),
        "held 8": column("held, d = 8", of(2, 8), "counted", ".2f"),
        "held 64": column("64", of(2, 64), "counted", ".2f"),
        **{place: column(f"time, d = 2, {place}", lambda name, result=result: time_cell(name, None, result), "measured")
           for place, result in measured("muon").items()}})


BLOCKS = {"table": lambda: markdown(table()), "balance": lambda: markdown(balance_table()),
          "muon": lambda: markdown(muon_table()),
          "losses": lambda: "\n".join(markdown(report.sheets["losses"]) for report in saved_in("losses.json"))}


def main():
    parser = command_line.Parser("variants", __doc__)
    parser.add_argument("--page", action="store_true", help="put the tables into variants/README.md")
    if parser.parse_args().page:
        command_line.write("--page", PAGE, rewritten(PAGE.read_text(encoding="utf-8"), BLOCKS), parser.error)
    else:
        print(*(make() for make in BLOCKS.values()), sep="\n\n")


if __name__ == "__main__":
    main()
