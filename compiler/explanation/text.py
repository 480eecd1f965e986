"""An explanation as text, for a terminal. Equal layers of one container are said once."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compiler.explanation.facts import (
    Attention,
    Detail,
    Experts,
    Explanation,
    Group,
    Layer,
    Missed,
    Model,
    Recurrence,
    Refusal,
    Rotary,
)
from compiler.explanation.layers import joined, layer_of
from runtime.errors import printable, shorten

Row = tuple[str, str]
LABEL = 12  # columns of a row's label
WIDTH = 100  # columns of a line, unless one word is longer
SHOWN = ("canonicalize", "fuse_", "merge_")  # passes whose counts are said: those that look for patterns


def text_of(found: Explanation) -> str:
    """All of it, with a newline at the end."""
    sections = [_section(found.model.name, list(_model(found.model)))]
    sections += [_section(title, rows) for title, rows in _folded(found.layers)]
    if found.groups:
        sections.append(_section("KV cache", list(_cache(found))))
    sections += [_detail(detail) for detail in found.details]
    if found.refused is not None:
        sections.append(_section(f"Refused by {found.refused.stage}", list(_refusal(found.refused))))
        if sections[1:-1]:
            sections[-1] += "\nAbove is what was recognised until then.\n"
    return printable("\n".join(sections))


def _section(title: str, rows: Sequence[Row]) -> str:
    return "\n".join([" ".join(title.split()), *(line for row in rows for line in _lines(*row))]) + "\n"


def _lines(label: str, text: str) -> list[str]:
    """A row; what does not fit on a line goes on below its beginning."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:{LABEL}} ",
        subsequent_indent=" " * (LABEL + 3),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _model(model: Model) -> Iterator[Row]:
    yield "source", f"{model.kind} {model.source}".strip()
    if model.config:
        yield "config.json", ", ".join(f"{k}={_field(v)}" for k, v in model.config.items())
    if model.parameters is not None:
        yield "parameters", f"{model.parameters:,} in {model.weights} arrays"
    elif model.weights:
        yield "weights", f"{model.weights} arrays"
    if model.width is not None:
        yield (
            "shape",
            f"{_number(model.num_layers, 'layer')} with attention or a recurrence, width {model.width:,}",
        )
    for name, modules in model.tied.items():
        yield "tied", f"@{name}: read by {', '.join(modules)}"
    if model.stored:
        yield "stored as", ", ".join(f"{dtype} ({count:,})" for dtype, count in model.stored.items())
    if model.dtype:
        yield "compiled as", f"{model.dtype}: linears and the KV cache"
    if model.vocab_size is not None:
        yield "vocabulary", f"{model.vocab_size:,}"
    if model.max_context is not None:
        yield "context", f"{model.max_context:,} tokens"
    if model.positions:
        yield "positions", ", ".join(model.positions)
    for path, text in model.frozen.items():
        yield "frozen", f"{path}: {text}, for shorter sequences too; --max-context sets it"


def _field(value: Any) -> str:
    """A field of config.json, whatever it is."""
    try:
        return shorten(_value(value), 400)
    except RecursionError:
        return "nested too deep to be shown"


def _value(value: Any) -> str:
    """A list that repeats itself is said by its runs."""
    if isinstance(value, list):
        return f"[{', '.join(_runs([str(v) for v in value]))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in value.items()) + "}"
    return str(value)


def _runs(words: Sequence[str]) -> list[str]:
    runs: list[tuple[str, int]] = []
    for word in words:
        same = bool(runs) and runs[-1][0] == word
        runs = [*runs[:-1], (word, runs[-1][1] + 1)] if same else [*runs, (word, 1)]
    return [word if count == 1 else f"{count} x {word}" for word, count in runs]


def _folded(layers: Sequence[Layer]) -> Iterator[tuple[str, list[Row]]]:
    """Each kind of layer with its rows, in the order of the first of each kind."""
    kinds: dict[Any, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(_kind(layer), []).append(layer)
    for same in kinds.values():
        rows = list(_rows(same[0]))
        if rows:
            yield _title(same), rows


def _kind(layer: Layer) -> Any:
    """What layers that are said once have in common."""
    return layer.container, layer.index is None, repr(list(_rows(layer)))


def _title(same: Sequence[Layer]) -> str:
    first = same[0]
    if first.index is None:
        return "outside of layers"
    numbers = [b.index for b in same if b.index is not None]
    many = f" ({len(numbers)} alike)" if len(numbers) > 1 else ""
    return f"{first.container or 'modules'} {_spans(numbers)}{many}".strip()


def _spans(numbers: Sequence[int]) -> str:
    """0-4, 6-10 of sorted numbers."""
    spans: list[list[int]] = []
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _rows(layer: Layer) -> Iterator[Row]:
    yield from _shifts(layer.attentions)
    for attention, count in _counted([a for a in layer.attentions if a.back is None]):
        yield "attention", _times(count) + _attention(attention)
        yield "mask", attention.mask + (f" ({attention.proof})" if attention.proof else "")
        if attention.kv_bytes_per_token is not None:
            yield "KV", f"group {attention.group}, {attention.kv_bytes_per_token:,} bytes per token"
    for recurrence, count in Counter(layer.recurrences).items():
        yield "recurrence", _times(count) + _recurrence(recurrence)
        if recurrence.group is not None:
            yield "state", f"group {recurrence.group}"
    yield from (("rotary", _rotary(r)) for r in layer.rotary)
    if not layer.rotary:
        yield from (("rotary", f"not fused: {reason}") for reason in _reasons(layer.misses, "fuse_rope"))
    if layer.norms:
        yield "norms", _counts(layer.norms)
    if layer.linears:
        was = (
            f"{layer.num_linears}, run as {len(layer.linears)}: "
            if layer.num_linears != len(layer.linears)
            else ""
        )
        yield "linears", was + "; ".join(layer.linears)
    yield from (("experts", _experts(e)) for e in layer.experts)
    if layer.others:
        yield "others", _counts(layer.others)
    shown = {n: c for n, c in layer.rewritten.items() if n.startswith(SHOWN)}
    if shown and layer.index is not None:
        yield "passes", _counts(shown)
    for stage in dict.fromkeys(m.stage for m in layer.misses if m.stage.startswith(SHOWN)):
        if not stage.startswith(("fuse_rope", "merge_")):
            yield from (("near miss", reason) for reason in _reasons(layer.misses, stage, of_rule=True))


def _shifts(attentions: Sequence[Attention]) -> Iterator[Row]:
    """Tokens that are read one by one, of one width and group on one line."""
    backs: dict[tuple[int, int | None], set[int]] = {}
    for a in attentions:
        if a.back is not None:
            backs.setdefault((a.query_heads * a.value_size, a.group), set()).add(a.back)
    for (width, group), found in backs.items():
        places = ", ".join(map(str, sorted(found)))
        yield (
            "shift",
            f"{_number(width, 'channel')} of the tokens {places} back"
            + ("" if group is None else f", KV group {group}"),
        )


def _counted(attentions: Sequence[Attention]) -> list[tuple[Attention, int]]:
    """Equal attentions once, each with how often it is there, whichever layers of a group they are."""
    found: dict[Attention, int] = {}
    for attention in attentions:
        key = replace(attention, kv_layer=None)
        found[key] = found.get(key, 0) + 1
    return list(found.items())


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _times(count: int) -> str:
    return f"{count} x " if count > 1 else ""


def _attention(a: Attention) -> str:
    size = str(a.head_size) if a.head_size == a.value_size else f"{a.head_size} (values {a.value_size})"
    notes = [
        f"scale {a.scale:.6g}",
        *([f"softcap {a.softcap:g}"] if a.softcap else []),
        *(["sinks"] if a.sinks else []),
        *(["ALiBi"] if a.alibi else []),
        *(["bias by distance"] if a.by_distance else []),
    ]
    heads = f"{_number(a.query_heads, 'query head')}, {_number(a.kv_heads, 'KV head')}"
    return f"{heads}, size {size}, {', '.join(notes)}"


def _experts(e: Experts) -> str:
    chosen = f"{e.chosen} of {e.count}" + (f" by {e.scores}" if e.scores else "")
    chosen += f" of {e.router}" if e.router and e.scores else f" by {e.router}" if e.router else ""
    notes = [
        f"width {e.inner}",
        *([e.activation] if e.activation != "none" else []),
        *(["gated"] if e.gated else []),
        *(["bias"] if e.bias else []),
    ]
    shared = f"; and for every token {', '.join(e.shared)}" if e.shared else ""
    return f"{chosen}, {', '.join(notes)}: {joined(_few(e.weights))}{shared}"


def _few(names: Sequence[str]) -> list[str]:
    """Not all, where each expert has arrays of its own."""
    return [*names[:3], *([f".. {len(names)} arrays"] if len(names) > 3 else [])]


def _rotary(r: Rotary) -> str:
    part = (
        f"all {r.head_size} elements"
        if r.rotated == r.head_size
        else f"{r.rotated} of {r.head_size} elements"
    )
    start = f" from {r.offset}" if r.offset else ""
    pairs = "neighbours" if r.interleaved else "halves"
    tables = f", from {', '.join(f'@{t}' for t in r.tables)}" if r.tables else ""
    return f"{part}{start}, paired as {pairs}{tables}"


def _reasons(misses: Sequence[Missed], stage: str, of_rule: bool = False) -> list[str]:
    """Each reason once, after the rule that missed."""
    found = [m for m in misses if m.stage == stage]
    return list(dict.fromkeys(f"{m.stage} ({m.rule}): {m.reason}" if of_rule else m.reason for m in found))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _cache(found: Explanation) -> Iterator[Row]:
    for g, group in enumerate(found.groups):
        yield f"group {g}", _group(group)
    yield "in all", f"{found.kv_bytes_per_token:,} bytes per token"


def _group(group: Group) -> str:
    if group.state:
        return (
            f"{_places(group.layers)}, keeps the last token's state, {', '.join(group.streams)}, blocks of "
            f"{group.block}: {group.block_bytes:,} bytes for each request"
        )
    lifetime = "every token" if group.window is None else f"the last {group.window} tokens"
    return (
        f"{_places(group.layers)}, keeps {lifetime}, {', '.join(group.streams)}, blocks of {group.block}: "
        f"{group.bytes_per_token:,} bytes per token"
    )


def _recurrence(found: Recurrence) -> str:
    keys = f", {found.key_heads} of keys" if found.key_heads != found.heads else ""
    heads = "head" if found.heads == 1 else "heads"
    size = f"{found.sizes[0]} x {found.sizes[1]}"
    return f"{found.heads} {heads} of {size}{keys}, {found.rule}"


def _places(locs: Sequence[str]) -> str:
    """`model.layers 0-4, 6-10 (10 layers)`."""
    containers: dict[str, list[int]] = {}
    for container, index in map(layer_of, locs):
        containers.setdefault(container, []).extend([] if index is None else [index])
    spans = ", ".join(f"{name} {_spans(numbers)}".strip() for name, numbers in containers.items() if numbers)
    count = _number(len(locs), "layer")
    return f"{spans} ({count})" if spans else count


def _detail(detail: Detail) -> str:
    parts = [f"{detail.name}, as imported", *detail.before, ""] if detail.before else []
    return "\n".join([*parts, f"{detail.name}, after the passes", *detail.after]) + "\n"


def _refusal(refused: Refusal) -> Iterator[Row]:
    yield "reason", refused.reason
    for label, text in (
        ("where", _short(refused.where)),
        ("op", refused.op),
        ("module", refused.module),
        ("line", _short(refused.line)),
    ):
        if text:
            yield label, text
    for miss in refused.because:
        yield "because", f"{miss.reason}, at {miss.op}" + (f" in {miss.module}" if miss.module else "")
    if refused.todo:
        yield "do", refused.todo


def _short(place: str) -> str:
    """A source line, its file named from the package on."""
    return re.sub(r"^(File )?(\S*/site-packages/)?", "", place)
