"""The cache of what was built: damage is found, size bounded, and a folder that cannot be used costs time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from codegen import cpp
from codegen.cache import Cache, cache_limit, default_cache
from tests.codegen.harness import best_level

KEYS = [f"{n:064x}" for n in range(9)]


def held(folder: Path) -> set[str]:
    return {path.name for path in (folder / "kernels").iterdir()}


def test_what_was_put_is_found_and_what_is_damaged_is_not(tmp_path: Path) -> None:
    cache, content = Cache(tmp_path), os.urandom(1000)
    assert cache.get("kernels", KEYS[0]) is None
    cache.put("kernels", KEYS[0], content)
    assert Cache(tmp_path).get("kernels", KEYS[0]) == content
    file = tmp_path / "kernels" / KEYS[0]
    whole = file.read_bytes()
    for place in (0, 20, 90, len(whole) - 1):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.get("kernels", KEYS[0]) is None, place
    file.write_bytes(whole[:-1])
    assert cache.get("kernels", KEYS[0]) is None
    assert (cache.hits, cache.misses) == (0, 6)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=5 * 1100)
    for age, key in enumerate(KEYS):
        cache.put("kernels", key, bytes(1000))
        used = time.time() - 100 - age
        os.utime(tmp_path / "kernels" / key, (used, used))
    assert cache.get("kernels", KEYS[8])  # used just now
    cache.prune()
    assert held(tmp_path) == {*KEYS[:4], KEYS[8]}


def test_pruning_touches_nothing_else(tmp_path: Path) -> None:
    for name in ("thesis.txt", "kernels/thesis.txt", "Documents/" + KEYS[0]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("years")
    cache = Cache(tmp_path, limit=1)
    cache.put("kernels", KEYS[0], b"content")
    (tmp_path / "kernels/.0123456789abcdef.part").write_text("of a process that was killed")
    os.utime(tmp_path / "kernels/.0123456789abcdef.part", (0, 0))
    (tmp_path / "rebuilt" / KEYS[1]).mkdir(parents=True)
    (tmp_path / "rebuilt" / KEYS[1] / "kernels.json").write_text("{}")
    cache.prune()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"thesis.txt", "kernels/thesis.txt", "Documents/" + KEYS[0]}
    assert not any((tmp_path / "rebuilt").iterdir())


@pytest.mark.parametrize("fault", ["a file is in the way", "the disk is full"])
def test_a_folder_that_cannot_be_written_costs_time_and_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    notes: list[str] = []
    if fault == "a file is in the way":
        (tmp_path / "kernels").write_text("")
    else:
        (tmp_path / "kernels").mkdir()
        monkeypatch.setattr(Path, "write_bytes", full)
    cache = Cache(tmp_path)
    cache.note = notes.append
    for key in KEYS:
        cache.put("kernels", key, b"content")
        assert cache.get("kernels", key) is None
    cache.prune()
    (note,) = notes
    assert str(tmp_path) in note and "OCTAVO_CACHE" in note
    assert fault == "a file is in the way" or held(tmp_path) == set()


def full(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content[:3])
    raise OSError(28, "No space left on device")


def test_many_at_once_never_see_half(tmp_path: Path) -> None:
    content, wrong = os.urandom(1 << 16), list[bytes]()

    def work() -> None:
        cache = Cache(tmp_path, limit=1 << 17)
        for key in KEYS * 5:
            found = cache.get("kernels", key)
            wrong.extend([] if found in (None, content) else [found or b""])
            cache.put("kernels", key, content)
            cache.prune()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and held(tmp_path) <= set(KEYS)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", 2 << 30),
        ("0", 0),
        ("1000", 1000),
        ("1.5GB", 1_500_000_000),
        ("3 mib", 3 << 20),
        ("2GiB", 2 << 30),
    ],
)
def test_limits_are_sizes(text: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_LIMIT", text)
    assert cache_limit() == limit


@pytest.mark.parametrize("text", ["much", "-1", "1e9", "2 GiBs", "nan", "GiB"])
def test_what_is_no_size_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match="OCTAVO_CACHE_LIMIT"):
        default_cache()


def test_a_limit_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=0)
    cache.put("kernels", KEYS[0], b"content")
    assert cache.get("kernels", KEYS[0]) is None and not any(tmp_path.iterdir())


def test_libraries_are_the_same_with_a_cache_without_and_over_a_damaged_one(tmp_path: Path) -> None:
    kept, found = tmp_path / "cache", list[bytes]()
    for name in ("built", "found", "none", "over"):
        if name == "over":
            (file,) = (kept / "objects").iterdir()
            file.write_bytes(file.read_bytes()[:-1])
        cache, folder = Cache(None if name == "none" else kept), tmp_path / name
        folder.mkdir()
        (folder / "forward.cpp").write_text("#include <cstdio>\nvoid f() { std::puts(__FILE__); }\n")
        (kernel,) = cpp.build(folder, [best_level()], cache=cache)
        found.append((folder / kernel.file).read_bytes())
        assert (cache.hits, cache.misses) == ((1, 0) if name == "found" else (0, 1))
    assert len(set(found)) == 1
    assert Cache(kept).get("objects", next((kept / "objects").iterdir()).name)
