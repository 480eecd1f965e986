"""Recorded steps as a Chrome trace (the Trace Event Format's complete events), which Perfetto reads too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compiler.profile.figures import StepFigures


def chrome_trace(steps: Mapping[str, StepFigures]) -> dict[str, Any]:
    """One process per step, from time zero; one lane per thread: the step, in it kernels, in them waits."""
    events = [
        event for pid, (name, step) in enumerate(steps.items()) for event in _step_events(pid, name, step)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step_events(pid: int, name: str, step: StepFigures) -> Iterator[dict[str, Any]]:
    line, kernels = step.timeline, step.kernels
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{name} step"}}
    for tid, spans in enumerate(line.threads):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"thread {tid}"}}

        def event(label: str, start: int, end: int, tid: int = tid) -> dict[str, Any]:
            at = {"ts": (start - line.start) / 1000, "dur": (end - start) / 1000}  # microseconds
            return {"ph": "X", "name": label, "pid": pid, "tid": tid, **at}

        yield event(name, line.start, line.end)
        for span in spans:
            figures = kernels[span.kernel]
            shown = {k: v for k, v in figures.as_json().items() if not k.endswith("_s")}
            yield event(figures.kernel.label, span.start, span.end) | {"args": shown}
            for start, end in span.waits:
                yield event("wait", start, end)
