"""A few cases of each fuzzer; `make fuzz` runs them for as long as one likes. And what they watch is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from compiler.errors import CompileError
from tests.fuzz import mutate
from tests.fuzz.fuzzer import check_refusal, kind_of
from tests.fuzz.watch import Fault

ROOT = Path(__file__).parents[2]
CASES = {
    "safetensors": 30,
    "index": 30,
    "ir": 8,
    "artifact": 12,
    "weights": 30,
    "gpu": 10,
    "gguf": 20,
    "onnx": 12,
    "template": 15,
    "tokenizer": 60,
}


@pytest.mark.parametrize("name", list(CASES))
def test_no_case_is_a_fault(name: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--cases", str(CASES[name]), "--seed", "ci"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0 and "0 faults" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


WATCHED = """
import resource, sys
from pathlib import Path
from tests.fuzz.watch import Fault, TooLong, Watch
root = Path(sys.argv[1])
watch = Watch(root / "case", root / "temporary", evaluates=False)
watch.limit_memory()
try:
    with watch.case():
        {}
except (Fault, TooLong, MemoryError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("statement", "seen"),
    [
        ("open(root / 'outside')", "reads"),
        ("open(root / 'case/../outside')", "reads"),
        ("open(root / 'case/link')", "reads"),
        ("open(root / 'case/new', 'w')", "writes"),
        ("eval('1 + 1')", "evaluates"),
        ("import subprocess; subprocess.run(['true'])", "subprocess"),
        ("bytearray(3 << 30)", "MemoryError"),
        ("exec(compile('1', str(root / 'case/model.py'), 'exec'))", "runs"),
        ("open(root / 'case/in').read()", ""),
    ],
)
def test_what_a_reader_must_not_do_is_seen(tmp_path: Path, statement: str, seen: str) -> None:
    for folder in ("case", "temporary"):
        (tmp_path / folder).mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "case/in").write_text("in")
    (tmp_path / "case/link").symlink_to("../outside")
    command = [sys.executable, "-c", WATCHED.format(statement), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert seen in done.stdout and bool(seen) == bool(done.stdout), done.stdout


def test_a_refusal_must_say_all_three_in_printable_text() -> None:
    check_refusal(CompileError("it is wrong", where="here", todo="Mend it"))
    with pytest.raises(Fault, match="without"):
        check_refusal(CompileError("it is wrong"))
    with pytest.raises(Fault, match="in it"):
        check_refusal(ValueError("\x1b[31m"))
    assert kind_of(CompileError("'a' at 7")) == kind_of(CompileError("'b' at 12"))


def test_a_seed_makes_the_same_cases() -> None:
    made = [
        mutate.raw_json(Random("x"), mutate.mutated(Random("y"), {"a": [1, 2], "b": "c"})) for _ in range(2)
    ]
    assert made[0] == made[1]
