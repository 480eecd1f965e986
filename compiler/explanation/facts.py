"""What is said of a model: plain values, which the command prints and `Explanation.json` gives whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attention:
    """One attention. scale, softcap: of its scores; softcap 0: none.

    mask: in words, or as the predicate over positions q and k. window: the lifetime of its keys, None: all.
    back: how far back the only key is that it reads, as a shift or a tap of a convolution does. proof: how
    the mask was proved; "" where that is not known. group, kv_layer: where its keys and values are, None
    until they are paged.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    softcap: float
    sinks: bool
    alibi: bool
    by_distance: bool
    mask: str
    window: int | None
    back: int | None
    proof: str
    group: int | None = None
    kv_layer: int | None = None
    kv_bytes_per_token: int | None = None


@dataclass(frozen=True)
class Rotary:
    """Rotation of `rotated` of `head_size` elements of queries or keys. tables: weights it is made from."""

    rotated: int
    head_size: int
    offset: int
    interleaved: bool
    tables: tuple[str, ...]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which `chosen` of `count` are computed for each token.

    inner: width between an expert's matrices. activation: there, or the ops that it is written out in. gated:
    whether it is multiplied by a second product. scores: softmax or sigmoid, if they are chosen by that.
    router: the module of the linear that they are chosen by. weights: the stacks' names. shared: modules
    beside them that every token is given to.
    """

    count: int
    chosen: int
    inner: int
    activation: str
    gated: bool
    bias: bool
    scores: str
    router: str
    weights: tuple[str, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Missed:
    """A pattern that began to match at an op, and why it did not."""

    stage: str
    rule: str
    reason: str
    op: str
    module: str
    line: str = ""


@dataclass(frozen=True)
class Recurrence:
    """sizes: a state's. decay: of each head, channel of the keys, or element of the state. delta: whether a
    token adds what is not there yet (the delta rule). group: of the KV cache, None before it is paged.
    """

    heads: int
    key_heads: int
    sizes: tuple[int, int]
    decay: str
    delta: bool
    group: int | None = None

    @property
    def rule(self) -> str:
        return f"a decay of each {self.decay}" + (", delta rule" if self.delta else "")


@dataclass(frozen=True)
class Layer:
    """The ops of one numbered module; index None: of what is outside of all.

    linears: what is left of them after the passes, in the order in which they run, of `num_linears` in the
    model. experts: mixtures of them. norms, others: how often each op is there. rewritten: how many ops each
    pass changed.
    """

    container: str
    index: int | None
    attentions: tuple[Attention, ...]
    rotary: tuple[Rotary, ...]
    norms: Mapping[str, int]
    linears: tuple[str, ...]
    num_linears: int
    others: Mapping[str, int]
    rewritten: Mapping[str, int]
    misses: tuple[Missed, ...]
    experts: tuple[Experts, ...] = ()
    recurrences: tuple[Recurrence, ...] = ()

    @property
    def name(self) -> str:
        """Its module path."""
        return ".".join(str(p) for p in (self.container, self.index) if p not in ("", None))


@dataclass(frozen=True)
class Group:
    """A KV group. layers: the modules of its attentions or recurrences, in order. streams: as
    `k f32[heads,head_size]`. state: it keeps recurrences' state, of which a request has a block or two.
    """

    layers: tuple[str, ...]
    window: int | None
    block: int
    streams: tuple[str, ...]
    bytes_per_token: int
    state: bool = False
    block_bytes: int = 0


@dataclass(frozen=True)
class Refusal:
    """The first reason why not: in which stage, at which op, where in the model, and what to do.

    where: of what is about no op, such as a file. because: near misses of the passes before it, in the same
    module.
    """

    stage: str
    reason: str
    todo: str = ""
    op: str = ""
    module: str = ""
    line: str = ""
    where: str = ""
    because: tuple[Missed, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model as a whole. parameters: None where it is not known which of its arrays are parameters.

    tied: weights that more than one module reads, with those modules. stored: parameters by the element
    type that the checkpoint has them in. dtype: of linears and the KV cache once compiled. num_layers:
    numbered modules with attention or a recurrence. width: of a token's embedding. positions: how the
    model knows them. frozen: choices by length that were made once. config: fields of its config.json.
    """

    name: str
    source: str
    kind: str
    parameters: int | None = None
    weights: int = 0
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stored: Mapping[str, int] = field(default_factory=dict)
    dtype: str = ""
    vocab_size: int | None = None
    num_layers: int = 0
    width: int | None = None
    max_context: int | None = None
    positions: tuple[str, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """What the compiler makes of a model. refused: None if it can be compiled.

    layers: in the order of the model, and last the ops outside of them. details: the ops of the layers that
    were asked for.
    """

    model: Model
    layers: tuple[Layer, ...] = ()
    groups: tuple[Group, ...] = ()
    passes: Mapping[str, int] = field(default_factory=dict)
    refused: Refusal | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    details: tuple[Detail, ...] = ()

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups if not group.state)

    @property
    def json(self) -> dict[str, Any]:
        """All of it, as JSON has it; each layer has its name besides."""
        layers = [{"name": each.name, **asdict(each)} for each in self.layers]
        return {**asdict(self), "layers": layers, "kv_bytes_per_token": self.kv_bytes_per_token}

    def __str__(self) -> str:
        from compiler.explanation.text import text_of

        return text_of(self)


@dataclass(frozen=True)
class Detail:
    """The ops of one layer as text: as they were imported, and after the last pass."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
