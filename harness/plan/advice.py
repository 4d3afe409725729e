"""A plan in words: which stage, which bucket, and when DDP."""

from harness.plan.planner import AS_FAST, COMPARED, HYBRID

MORE_RANKS = (8, 32, 128, 512)  # that --advise compares at


def advice(planner, result):
    """-> sentences."""
    args, world, rows = planner.args, planner.args.world, {row.base: row for row in result.rows}
    ours, owner, ddp = (rows[base].choice for base in COMPARED[args.dtype])
    fitting = {row.choice: planner.ms(row.choice, world) for row in result.rows if row.fits_from}
    room, stage4 = f"{args.device_memory:g} GB", planner.recorded[ours, world]
    sizes = [f"{base} {'|'.join(planner.tuned(base, trees=trees).size for trees in (False, True))}"
             for base in [ours.base, HYBRID] if base in rows]
    fastest = "; ".join(f"{choice.name}, {fitting[choice]:,.0f} ms" for choice in sorted(fitting, key=fitting.get)[:3])
    once, each = (planner.ms(ours, world, 8, exchange_each) for exchange_each in (False, True))
    said = [f"Stage: {len(fitting)} rows fit in {room}; fastest are {fastest} a micro-batch." if fitting else
            f"Stage: none fits in {room}. Let devices share layers (--tensor-parallel 8), or take FSDP2.",
            f"Bucket in rings|trees: {'; '.join(sizes)}.",
            f"Accumulation: {'an exchange each' if each <= AS_FAST * once else 'an exchange a step: no_sync()'}. Of 8 "
            f"micro-batches one takes {each:,.0f} ms with an exchange each, and {once:,.0f} ms with one a step, which "
            f"keeps whole gradients of {stage4.held['parameters'] / 1e9:.1f} GB."]
    ranks = sorted({d for d in MORE_RANKS if d < world} | {world})
    planner.run([ours, owner, ddp], ranks)
    for title, choice in (("Owner's reduce", owner), ("DDP", ddp)):
        over = {d: planner.ms(choice, d) / planner.ms(ours, d) for d in ranks}
        slower = next((d for d in ranks if all(over[more] > AS_FAST for more in ranks if more >= d)), 0)
        behind = f"behind stage 4 from {slower} ranks on" if slower else "as fast as stage 4 or faster"
        said.append(f"{title}: {behind}, of whose time it takes {', '.join(f'{over[d]:.2f} on {d}' for d in ranks)}. "
                    f"It {'fits' if rows[choice.base].fits_from else 'does not fit'} in {room}.")
    return said
