"""A recorded step as a trace for https://ui.perfetto.dev and chrome://tracing."""

from harness.rows.spans import MEMORY_PARTS


def trace(rows):
    """The same as events of Chrome's trace format: a process a row, a thread a lane. Times in microseconds."""
    events = []
    for process, (name, step) in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        messages = [(message.start, message.end, f"{message.kind} {message.bytes} bytes", message.kind)
                    for message in step.communication]
        phases = [(start, end, phase, "phases") for phase, start, end in step.phases]
        computes = [(start, end, "computes", "computes") for start, end in step.busy]
        events += [{"ph": "C", "name": "memory", "pid": process, "ts": i / MEMORY_PARTS * step.seconds * 1e6,
                    "args": {"bytes": n_bytes}} for i, n_bytes in enumerate(step.memory)]
        threads = {}
        for start, end, what, lane in phases + computes + messages:
            thread = threads.setdefault(lane, len(threads))
            events.append({"ph": "X", "name": what, "pid": process, "tid": thread, "ts": start * 1e6,
                           "dur": (end - start) * 1e6})
        events += [{"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
                   for lane, thread in threads.items()]
    return {"traceEvents": events}
