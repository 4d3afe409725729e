"""Tables and pictures of rows measured on two hosts: what a link allows, and how near to that each row comes."""

from harness.publishing import pictures, row_names
from harness.publishing import results as saved
from harness.publishing.results import Marked, ratio
from harness.publishing.row_names import (
    COMPUTE_ONLY,
    DEFAULT_MB,
    ONE_PARAMETER,
    OVERLAP,
    REFERENCE,
    SIZES,
    RowId,
    is_whole,
)
from harness.publishing.tables import METHODS, TEXT, cells_of, column, failures, label_of, names, rate_words, sheet_of

SHORT = {"float32": "", "bfloat16": " bf16"}  # behind the name of a row
TUNED = "ddp, tuned"
FLOOR = "floor"


def link_ms(result, row):
    """Return the ms that a row's bytes take by the formula; None of a row that has failed."""
    if row.wire_bytes_theory is None:
        return None
    return 1000 * 8 * row.wire_bytes_theory / result.conditions.bits_per_second


def over_floor(result, row):
    """Return a row's time over the larger of compute only, of the same dtype, and the link's time; None: not known."""
    link = link_ms(result, row)
    alone = result.timed(COMPUTE_ONLY + SHORT[row.dtype])
    return ratio(row.rounds_ms, [max(link, ms) for ms in alone.rounds_ms]) if alone and link is not None else None


def stage4_over(result, row):
    """Return stage 4's time over a row's, of the same dtype; None: stage 4 wasn't timed."""
    stage4 = result.timed(OVERLAP + SHORT[row.dtype])
    return ratio(stage4.rounds_ms, row.rounds_ms) if stage4 else None


def link_sheet(result):
    """Make the table of what no row can be faster than, with stage 4 beside each row."""
    return sheet_of(
        f"A link of {rate_words(result.conditions.rate)}", result.rows, {
            "name": names(label_of),
            "ms": column("ms a step\nmedian (min–max)", "rounds_ms", "measured", ".0f", shows="both"),
            "drain": column("drain\nms", "drain_ms", "measured", ".0f"),
            "exposed": column("exposed\nms", "exposed_ms", "measured", ".0f"),
            "link": column("line\nms", lambda row: link_ms(result, row), "formula", ".0f"),
            "over_floor": column("x floor", lambda row: over_floor(result, row), "measured", ".2f"),
            "stage4_over": column("stage 4\nover this", lambda row: stage4_over(result, row), "measured", ".2f")},
        [f"Line: bytes by the formula, over the rate. Ratios: medians, round by round. {METHODS}",
         *failures(result.rows)])


# -------------------------------------------------------------------------------------------------- One link to another


# Name in table and picture -> row, from the slowest to the fastest.
CURVES = {"stage 2, all-gather": row_names.ALL_GATHER, row_names.REPLICATED: row_names.REPLICATED,
          "stage 3, grad buffer": row_names.GRAD_BUFFER, "FSDP2": row_names.FSDP2, "DDP, default buckets": REFERENCE,
          "DDP, tuned buckets": TUNED, "stage 4, overlap": OVERLAP, FLOOR: FLOOR}


def row_of(result, base):
    return row_names.tuned_row(result, REFERENCE) if base == TUNED else result.timed(base)


def over_computing(result, base):
    """Return a row's time over that of computing alone, the median of the ratios by round; None: not measured."""
    alone = result.timed(COMPUTE_ONLY)
    if base == FLOOR:
        return max(1.0, link_ms(result, result.find(OVERLAP)) / alone.median_ms)
    row = row_of(result, base)
    return row.over(alone) if row else None


def curve_sheet(results):
    """Make the table of the curve: a row for each measure, a column for each rate, the slowest first."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)

    def of_row(base, get):
        def read(result):
            row = row_of(result, base)
            return get(result, row) if row else None
        return read
    measures = {name: (".2f", lambda result, base=base: over_computing(result, base)) for name, base in CURVES.items()}
    measures |= {
        "stage 4 over tuned DDP": (".2f", of_row(TUNED, stage4_over)),
        "stage 4 over the floor": (".2f", of_row(OVERLAP, over_floor)),
        "DDP's best buckets": (TEXT, of_row(TUNED, lambda _, row: row.size)),
        "compute only, ms": (".0f", of_row(COMPUTE_ONLY, lambda _, row: row.rounds_ms)),
        "rounds x steps": (TEXT, lambda result: f"{result.conditions.rounds} x {result.conditions.steps}"),
        "stage 4's drain, ms": (".0f", of_row(OVERLAP, lambda _, row: row.drain_ms))}
    by_rate = sheet_of("", results, {name: column(name, get, "", form) for name, (form, get) in measures.items()})
    columns = [rate_words(result.conditions.rate) for result in results]
    rows = [[name, *cells] for name, cells in zip(measures, zip(*cells_of(by_rate)))]
    conditions = [result.conditions for result in results]
    return sheet_of("Time per step over computing alone", rows, {
        "name": names(lambda row: row[0]),
        **{rate: column(rate.replace(" ", "\n"), lambda row, place=place: row[place], "measured")
           for place, rate in enumerate(columns, 1)}},
        [f"Medians of the ratios round by round. {METHODS}",
         *(f"{rate}: {c.machine}, {c.date}, commit {c.commit}." for rate, c in zip(columns, conditions))])


CURVE_COLOURS = ("#c0921c", "#8a8a8a", "#d06a2c", "#a060c0", "#7fa8d6", "#2f7fd4", "#2e9a58", "#888888")


def curve_picture(results):
    """Draw what overlap is worth on every link, the slowest first: time per step over that of computing alone."""
    figure, (axis,) = pictures.panels(1, 1, (7.6, 4.2))
    rates = [result.conditions.bits_per_second for result in results]
    for (name, base), colour in zip(CURVES.items(), CURVE_COLOURS):
        ratios = [(rate, over_computing(result, base)) for rate, result in zip(rates, results)]
        points = [(rate, over_alone) for rate, over_alone in ratios if over_alone is not None]
        style = {"linestyle": "-", "marker": "o", "markersize": 4, "linewidth": 1.5, "alpha": 1}
        if base == FLOOR:
            style |= {"linestyle": "--", "marker": ""}
        if base == row_names.REPLICATED:  # stage 3's line lies on it
            style |= {"markersize": 9, "linewidth": 5, "alpha": 0.5}
        axis.plot(*zip(*points), color=colour, label=name, **style)
    axis.set(xscale="log", yscale="log", xlim=(rates[0] / 1.05, rates[-1] * 1.05),
             title="What communication adds to a step, on two hosts", xlabel="rate of the link",
             ylabel="time per step / time of computing alone")
    axis.set_xticks(rates, [rate_words(result.conditions.rate).replace(" ", "\n") for result in results])
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 10) if tick <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return pictures.drawn(figure)


# --------------------------------------------------------------------------------- Accumulation, and sizes of buckets


def accumulation_sheets(accumulation):
    """Make the tables of what an exchange each costs stage 4, and of communication's share of a step."""
    first = accumulation.rows[0]  # with one micro-batch both ways are the same
    noise = max(abs(each_ms / once_ms - 1) for once_ms, each_ms in zip(first.no_sync_ms, first.each_ms))

    def price(row):
        over_no_sync = ratio(row.each_ms, row.no_sync_ms)
        return Marked(over_no_sync, "~") if abs(over_no_sync - 1) <= noise else over_no_sync

    def share(field):
        return lambda row: 1 - ratio(row.compute_ms, getattr(row, field))
    number = column("micro-batches\na step", "micro_batches")
    exchanges = sheet_of(
        "Accumulation in stage 4, ms a micro-batch", accumulation.rows, {
            "number": number,
            "once": column("in no_sync:\none exchange", "no_sync_ms", "measured", ".0f", shows="both"),
            "each": column("without:\nan exchange each", "each_ms", "measured", ".0f", shows="both"),
            "price": column("x no_sync", price, "measured", ".2f")},
        ["Median (min–max). In no_sync whole gradients stay on each rank; without, they are reduced into the shard."],
        [f"~ within the noise: with one micro-batch both are the same, yet up to {noise:.0%} apart."])
    shares = sheet_of(
        "Communication's share of a step with one exchange", accumulation.rows, {
            "number": number, "compute": column("compute only,\nms a micro-batch", "compute_ms", "measured", ".0f"),
            "ddp": column("DDP\n", share("ddp_ms"), "measured", ".0%"),
            "stage3": column("stage 3\n", share("stage3_ms"), "measured", ".0%"),
            "stage4": column("stage 4\n", share("no_sync_ms"), "measured", ".0%")},
        [f"1 - compute only / this row. DDP: the row {RowId(REFERENCE, accumulation.ddp_mb).name}."])
    return [exchanges, shares]


def buckets_sheet(sweep):
    """Make the table of time by size of bucket; of stage 4 also what the size costs in messages and memory."""
    conditions = sweep.conditions
    swept = {row.row_id: row for row in sweep.rows}

    def of_row(base, get):
        return lambda size: get(swept[base, size]) if (base, size) in swept else None

    def messages(row):
        return row.collectives.get("send") or row.collectives.get("reduce_scatter")
    return sheet_of(
        "Bucket size, ms a step", [size for size in (*SIZES, None) if any(mb == size for _, mb in swept)], {
            "size": names(lambda size: RowId("", size).size),
            "ddp": column("ddp\n", of_row(REFERENCE, lambda row: row.rounds_ms), "measured", ".0f"),
            "stage4": column("stage 4\n", of_row(OVERLAP, lambda row: row.rounds_ms), "measured", ".0f"),
            "messages": column("its messages\nof gradients", of_row(OVERLAP, messages), "counted"),
            "bytes": column("its bytes a\nparameter", of_row(OVERLAP, lambda row: row.bytes_per_param), "counted",
                            ".2f")},
        [f"Medians of {conditions.rounds} round(s) of {conditions.steps} steps. DDP's default is {DEFAULT_MB} MiB. The "
         f"model's gradients have {conditions.parameters * 4 / 1e6:.1f} MB.", *failures(sweep.rows)])


def swept_times(rows, base):
    """Return [(place of the size in SIZES, ms), …] of one row of a sweep, in order."""
    return sorted((SIZES.index(DEFAULT_MB if row.bucket_mb is None else row.bucket_mb), row.median_ms)
                  for row in rows if row.base == base and row.rounds_ms)


def sweep_picture(results):
    """Draw the sweeps of results on two hosts, the slowest link first; "" where there is none."""
    swept = [result for result in results if is_whole(result.sweep)]
    if not swept:
        return ""
    figure, axes = pictures.panels(1, len(swept), (5 * len(swept), 3.4))
    for axis, result in zip(axes, swept):
        for base, colour in ((OVERLAP, "#3a9d5d"), (REFERENCE, "#4a90d9")):
            axis.plot(*zip(*swept_times(result.sweep.rows, base)), "o-", color=colour, label=base, markersize=4)
        axis.set_xticks(range(len(SIZES)), ["1 par." if size == ONE_PARAMETER else f"{size:g}" for size in SIZES])
        axis.set(title=f"{rate_words(result.conditions.rate)}: ms a step, by size of bucket", xlabel="MiB", ylim=0)
        axis.grid(axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside lower left")
    return pictures.drawn(figure)


# ------------------------------------------------------------------------------------- A recorded step, and all tables


def recorded_steps(result):
    """Return ([(name, recorded step on rank 0)], title) of the ladder, for pictures.text and pictures.svg."""
    conditions = result.conditions
    ddp = row_names.tuned_row(result, REFERENCE)  # a peer counts at its best setting
    ladder = [ddp if ddp and base == REFERENCE else result.find(base) for base in row_names.LADDER]
    steps = [(row.name, row.timeline[0]) for row in ladder if row and row.timeline]
    return steps, (f"One recorded step on rank 0 of {conditions.hosts} hosts with a link of "
                   f"{rate_words(conditions.rate)}; the table has medians of others")


def steps_picture(results):
    """Draw the recorded steps of the rate that is to be drawn; "" where no step was saved."""
    result = saved.to_draw(results)
    steps, title = recorded_steps(result) if result else ([], "")
    return pictures.svg(steps, title) if steps else ""


def sheets(result):
    """Return the tables of what was measured on a link."""
    parts = [link_sheet(result)]
    if result.sweep:
        parts.append(buckets_sheet(result.sweep))
    if result.accumulation:
        parts += accumulation_sheets(result.accumulation)
    return parts
