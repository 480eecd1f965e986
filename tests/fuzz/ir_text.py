"""The IR's text: parsed, verified, printed and parsed again; and passes over what is valid."""

from __future__ import annotations

import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

from compiler.errors import CompileError
from ir.graph import Graph
from ir.ops import OPS
from ir.text import ParseError, parse, print_graph
from ir.verify import VerifyError, verify
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.valid_graphs import grown

FOLDERS = (Path(__file__).parent / "graphs", Path(__file__).parents[1] / "data/ir")
VALID = tuple(path.read_text() for path in sorted(FOLDERS[0].glob("*.ir")))
GRAPHS = tuple(path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.ir")))
TOKENS = re.compile(r"[%@]?[A-Za-z_][\w.]*|\d+\.?\d*|\s+|.", re.DOTALL)
PIECES = (
    *("(", ")", "[", "]", "{", "}", ",", ":", ";", "=", "<", "<=", "&", "|", "~", "*", "//", "-", "+", ".."),
    *("\n", "// a", '"', "\\", "%x", "@w", "_", "true", "nan", "inf", "-1", "0", "1e400", "1.5", "9" * 19),
    *("9" * 5000, "2*T", "T*T", "min(T, 4)", "max(1, 2)", "mod(T, 3)", "ceildiv(T, 0)", "T//0", "f32", "kv"),
    *(
        "Table(0, q, k)",
        "__import__('os')",
        "f32[" + "4," * 60 + "4]",
        "(" * 60,
        "-" * 60,
        "~" * 60,
        "T" * 300,
    ),
    *(
        "é",
        "\x1b[31m",
        "\0",
        "9223372036854775807",
        "4611686018427387904*T",
        "(T+1)*(T+2)*(R+3)*(Q+5)*(M0+7)",
    ),
    *(
        "q*k*q*k",
        "[[[[1]]]]",
        "graph",
        "return",
        "dims",
        "arena",
        '"\\ud800"',
        '"\\u0000"',
        '%"a b"',
        '@"\\n"',
    ),
)


def make_text(rng: Random, folder: Path) -> None:
    text = rng.choice(GRAPHS)
    choice = rng.randrange(10)
    if rng.random() < 0.04:
        text = flooded(rng)
    elif choice < 8:
        text = edited(rng, text, GRAPHS)
    elif choice == 8:
        text = mutate.flipped(rng, text.encode()).decode("utf-8", "replace")
    (folder / "graph.ir").write_text(text, "utf-8", errors="surrogatepass")


def edited(rng: Random, text: str, others: tuple[str, ...]) -> str:
    """A text with tokens replaced, removed, repeated and swapped with those of others."""
    tokens = TOKENS.findall(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, choice = rng.randrange(len(tokens)), rng.randrange(8)
        if choice < 3:
            tokens[at] = rng.choice(PIECES)
        elif choice == 3:
            tokens[at] = rng.choice(TOKENS.findall(rng.choice(others)))
        elif choice == 4:
            tokens[at:at] = tokens[at : at + rng.randrange(30)]
        elif choice == 5:
            del tokens[at : at + rng.choice((1, 1, 2, 20))]
        elif choice == 6:
            tokens[at] = rng.choice(list(OPS))
        elif tokens[at].isdigit():
            tokens[at] = str(abs(mutate.integer(rng)))
        else:
            tokens[at] += rng.choice(PIECES)
        tokens = tokens or [" "]
    return "".join(tokens)


def flooded(rng: Random) -> str:
    """Much of one thing: terms, factors, operands, brackets, digits, attributes, ops, results."""
    count = rng.choice((50, 1000, 5000))
    names = [f"S{i}" for i in range(rng.choice((2, 20, 200)))]
    size = rng.choice(names) if rng.random() < 0.3 else rng.choice(_sizes(rng, names, count))
    bounds = ", ".join(f"{n}: 1..9" for n in names)
    body = rng.choice(_bodies(rng, names[0], size, count))
    return f"graph @g(%x: f32[{rng.choice((names[0], size))}]) dims {{{bounds}}} {{\n{body}  return %x\n}}\n"


def _sizes(rng: Random, names: list[str], count: int) -> tuple[str, ...]:
    few = min(count, 400)
    return (
        "+".join(rng.choice(names) for _ in range(count)),
        "*".join(rng.choice(names) for _ in range(few)),
        "*".join(f"({a}+{i})" for i, a in enumerate(names)),
        "+".join(f"{i}*S{i % 7}*S{i % 5}" for i in range(few)),
        *("(" * count + "1", "-" * count + "1", "9" * count),
        *("min(" * 40 + names[0] + ",1)" * 40, "ceildiv(" * 40 + "S0" + ",2)" * 40, "S0" + "//2" * 45),
        *(f"max({','.join(names)})", f"mod({'*'.join(names)}, 7)", f"mod({'+'.join(names)}, 7)"),
        "min(" + ",".join(f"S{i % 9}+{i}" for i in range(few)) + ")",
        "*".join(f"min({a},max({a},3))" for a in names),
    )


def _masks(count: int) -> tuple[str, ...]:
    few = min(count, 500)
    return (
        " & ".join(f"(k <= q + {i})" for i in range(few)),
        " | ".join(f"(k*{i} == q*q)" for i in range(few)),
        " & ".join(f"((k <= {i}) | (q > {i}))" for i in range(min(count, 60))),
        " & ".join(f"(min(k,{i}) <= max(q,{i}))" for i in range(few)),
        *("~" * 60 + "(k<=q)", "k <= q", "(" * 47 + "k<=q" + ")" * 47),
        *("*".join(["(k+q)"] * few) + " <= 1", "*".join(f"(k+{i})" for i in range(60)) + " < q"),
    )


def _bodies(rng: Random, name: str, size: str, count: int) -> tuple[str, ...]:
    many, mask = ",".join("2" * count), rng.choice(_masks(count))
    return (
        f"  %y = neg %x : f32[{size}]\n",
        f"  %y = reshape %x {{shape=[{size}]}} : f32[{size}]\n",
        "".join(f"  %v{i} = neg %x : f32[{name}]\n" for i in range(count)),
        f"  %y = attention %x, %x, %x, _ {{scale=1.0, mask={mask}}} : f32[1]\n",
        f"  %y = concat {', '.join(['%x'] * count)} {{axis=0}} : f32[{count}*{name}]\n",
        f"  %y = neg %x {{a=[{many}]}} : f32[1]\n",
        f"  %y = neg %x {{a={'[' * count}}} : f32[1]\n",
        f"  {', '.join(f'%r{i}' for i in range(count))} = split %x {{axis=0, sizes=[1]}} : f32[1]\n",
        f"  %y = full {{shape=[{many}], value=1.0}} : f32[{many}]\n",
        f"  %y = neg %x : f32[1] // {'x' * count}\n",
        f'  %y = neg %"{"x" * count}" : f32[1]\n',
    )


def read(folder: Path) -> str:
    """What is accepted prints to a text that reads back as the same graph, and the same text."""
    graph = parse((folder / "graph.ir").read_text("utf-8", errors="replace"))
    printed = print_graph(graph)
    assert reparsed(printed) == graph, "the printed text is another graph"
    assert print_graph(parse(printed)) == printed, "the printed text is printed otherwise"
    try:
        verify(graph)
    except VerifyError as error:
        shown = str(error)
        assert len(shown) < 100_000, len(shown)
        raise
    return "verified"


def reparsed(printed: str) -> Graph:
    try:
        return parse(printed)
    except ParseError as error:
        raise AssertionError(f"the printed text does not parse: {error}") from error


def make_passes(rng: Random, folder: Path) -> None:
    if rng.random() < 0.2:
        make_text(rng, folder)
    else:
        graph = grown(rng, parse(rng.choice(VALID)))
        (folder / "graph.ir").write_text(print_graph(graph))
    text = rng.choice(PASS_TEXTS)
    (folder / "passes").write_text(text if rng.random() < 0.9 else mutate.text(rng, text))


PASS_TEXTS = (
    "dce,cse,fold_constants",
    "canonicalize,fuse_attention,fuse_norm,fuse_rope,fuse_moe,merge_linears,page_kv",
    "canonicalize,page_kv{block=16},select_rows,fuse_epilogue,group_pointwise,plan_memory",
    "page_kv,select_rows,convert_weights,narrow_activations,fuse_casts,plan_memory",
    "plan_memory",
    "fuse_attention",
    "cse,group_pointwise{most=2}",
    "dce,select_rows,plan_memory",
)


def run_passes(folder: Path) -> str:
    """As `octavo opt` does."""
    from compiler.cli.opt import command

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        command(str(folder / "graph.ir"), (folder / "passes").read_text(), list_passes=False)
    return f"{(folder / 'passes').read_text()[:40]} ran"


_READERS = ("lexer", "cursor", "grammar", "parser", "expressions", "printer")
_OPT = ("compiler/cli/opt.py", "compiler/pass_text.py")
FUZZERS = (
    Fuzzer(
        "ir",
        make_text,
        read,
        (*(f"ir/text/{n}.py" for n in _READERS), "ir/verify.py"),
        (ParseError, VerifyError),
    ),
    Fuzzer("passes", make_passes, run_passes, _OPT, (CompileError,), evaluates=True),
)
