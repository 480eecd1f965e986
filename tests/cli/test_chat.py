"""`octavo chat`: turns and what of them is cached, commands, what is refused, and what a terminal shows."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import runtime
from compiler.cli.chat.reader import read_message
from compiler.cli.chat.session import Session
from compiler.cli.chat.settings import Settings
from compiler.cli.chat.tokens import Spellings
from compiler.cli.main import main
from runtime import OctavoError, Sampling
from runtime.tokenizer import Tokenizer as OctavoTokenizer
from tests.runtime.fake import BLOCK, VOCAB, fake_engine

ROOT = Path(__file__).parents[2]
LETTERS = "abcdefgh"
PAIRS = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
TOKENS = ["[", "]", "/", *LETTERS, *PAIRS]
TOKENS += [pair + "a" for pair in PAIRS][: VOCAB - len(TOKENS)]
OPEN, CLOSE = range(2)
SPECIAL = VOCAB  # beyond what the model knows: it samples text alone, and so no end
SEED = 3
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"


def letters(template: str | None = TEMPLATE) -> OctavoTokenizer:
    """Every text of the letters has many spellings; the tokenizer's own is in pairs."""
    merges = [(token[:-1], token[-1]) for token in TOKENS if token[0] in LETTERS and len(token) > 1]
    library = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return OctavoTokenizer(library.to_str(), {"chat_template": template}, bos_token_id=None)


class Chat:
    """Runs the command with an engine of a model that answers in letters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(
        self, *lines: str, args: tuple[str, ...] = (), template: str | None = TEMPLATE, **engine: Any
    ) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, of these lines on standard input."""
        made = fake_engine(**{"tokenizer": letters(template), **engine})
        self.monkeypatch.setattr(runtime, "load", lambda *_, **__: made)
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        with pytest.raises(SystemExit) as ended:
            main(["chat", "any.octavo", "--max-new-tokens", "20", "--seed", str(SEED), *args])
        return int(ended.value.code or 0), *self.capsys.readouterr()

    def json(self, *lines: str, args: tuple[str, ...] = (), **engine: Any) -> list[dict[str, Any]]:
        """The objects of --json, one a line; the exit code says whether an error is among them."""
        code, out, err = self(*lines, args=(*args, "--json"), **engine)
        found = [json.loads(line) for line in out.splitlines()]
        for each in found:
            if "error" in each:  # as the line that says it elsewhere
                parts = each["error"]
                each["error"] = str(OctavoError(parts["what"], where=parts["where"], todo=parts["todo"]))
        assert err == "" and [each["line"] for each in found] == list(lines)
        assert code == (2 if any("error" in each for each in found) else 0)
        return found


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    return Chat(monkeypatch, capsys)


class Expected:
    """A conversation in tokens, put together by hand."""

    def __init__(self, system: list[int] | None = None) -> None:
        self.ids = [] if system is None else [OPEN, *system, CLOSE]

    def ask(self, message: list[int], seed: int = SEED, max_new_tokens: int = 20) -> str:
        self.ids += [OPEN, *message, CLOSE, OPEN]
        self.prompt_tokens = len(self.ids)
        sampling = Sampling(max_new_tokens, temperature=0.7, top_p=0.95, seed=seed)
        with fake_engine(tokenizer=letters()) as engine:
            found = engine.submit(self.ids, sampling).result()
        self.computed = self.prompt_tokens + len(found.token_ids) - 1
        self.ids += [*found.token_ids, CLOSE]
        return found.text


A, B, C, AB = (TOKENS.index(text) for text in ("a", "b", "c", "ab"))


def test_each_line_is_a_message_and_standard_output_has_the_answers_alone(chat: Chat) -> None:
    want = Expected()
    answers = [want.ask([AB]), want.ask([C])]
    assert len(set(answers)) == 2 and all(answers)
    assert chat("ab", "", "c") == (0, "".join(f"{answer}\n" for answer in answers), "")


def test_earlier_turns_are_found_in_whole_blocks_as_they_were_sampled(chat: Chat) -> None:
    want, computed = Expected(), 0
    for found in chat.json("ab", "c", "a"):
        assert found["answer"] == want.ask([TOKENS.index(found["line"])])
        assert found["prompt_tokens"] == want.prompt_tokens
        assert found["cached_tokens"] == computed // BLOCK * BLOCK
        computed = want.computed
    assert computed > 4 * BLOCK


def test_retry_gives_the_answer_of_the_next_seed_in_the_place_of_the_last(chat: Chat) -> None:
    want = [Expected() for _ in range(3)]
    answers = [each.ask([A], seed) for seed, each in enumerate(want, start=SEED)]
    first, second, third, after = chat.json("a", "/retry", "/retry", "b")
    assert [each["answer"] for each in (first, second, third)] == answers and len(set(answers)) == 3
    assert [each["seed"] for each in (first, second, third, after)] == [SEED, SEED + 1, SEED + 2, SEED]
    assert after["answer"] == want[2].ask([B])
    (refused,) = chat.json("/retry")
    assert refused["error"] == "chat: no message has been sent yet. Send one first."
    refused = chat.json("a", "/retry", args=("--temperature", "0"))[1]
    assert refused["error"].startswith("/retry: at temperature 0 the answer is the same. Use /set")


def test_a_turn_is_taken_back_and_a_conversation_begun_anew(chat: Chat) -> None:
    want = Expected()
    first, second = want.ask([A]), want.ask([B])
    lines = ("a", "c", "/undo", "b", "/clear", "a", "/undo", "/undo")
    found = chat.json(*lines)
    assert [found[i]["answer"] for i in (0, 3, 5)] == [first, second, first]
    assert found[2]["text"] == f"1 turn, the last message is the assistant's: {first}"
    assert found[6]["text"] == "the conversation is empty"
    assert found[7]["error"] == "chat: no message has been sent yet. Send one first."


def test_the_system_prompt_comes_first_stays_and_can_be_changed(chat: Chat) -> None:
    lines = ("a", "/clear", "a", "/clear", "/system c", "a", "/system", "/system -", "/clear", "a")
    found = chat.json(*lines, args=("--system", "b"))
    with_b, with_c, without = Expected([B]).ask([A]), Expected([C]).ask([A]), Expected().ask([A])
    assert [each["answer"] for each in found if "answer" in each] == [with_b, with_b, with_c, without]
    assert [found[i]["found"] for i in (4, 6, 7)] == ["c", "c", None]


def test_a_saved_conversation_goes_on(chat: Chat, tmp_path: Path) -> None:
    file, want = tmp_path / "chat.json", Expected([B])
    answer = want.ask([A])
    (first, _) = chat.json("a", f"/save {file}", args=("--system", "b"))
    roles = [("system", "b"), ("user", "a"), ("assistant", answer)]
    assert json.loads(file.read_text()) == [{"role": role, "content": text} for role, text in roles]
    found = chat.json(f"/load {file}", "/retry", f"/save {file}")
    assert first["answer"] == answer and found[1]["answer"] == Expected([B]).ask([A], seed=SEED + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not a conversation"),
        (b"\xff\xfe\x00", "not a conversation"),
        (b"[" * 100_000, "not a conversation"),
        (b'{"role": "user"}', "no list of messages"),
        (b'[{"role": "user", "content": 1}]', "message 0 lacks a role or a content that is text"),
        (b'[{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]', "message 1 is a system"),
    ],
)
def test_a_file_that_is_no_conversation_is_neither_loaded_nor_replaced(
    chat: Chat, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(content)
    loaded, saved, answered = chat.json(f"/load {file}", f"/save {file}", "a")
    assert loaded["error"].startswith(f"{file}: not a conversation (") and said in loaded["error"]
    assert saved["error"] == f"{file}: there is a file that is no conversation. Give another name."
    assert answered["answer"] == Expected().ask([A])
    assert file.read_bytes() == content and list(tmp_path.iterdir()) == [file]


def test_files_that_cannot_be_opened_are_one_line(chat: Chat, tmp_path: Path) -> None:
    found = chat.json(
        f"/load {tmp_path}/none.json", f"/save {tmp_path}/no/chat.json", "/save", f"/load {tmp_path}"
    )
    assert found[0]["error"].startswith(f"{tmp_path}/none.json: No such file")
    assert found[1]["error"].startswith(f"{tmp_path}/no/") and "No such file" in found[1]["error"]
    assert found[2]["error"] == "/save: no file is named. Say which: /save chat.json."
    assert found[3]["error"].startswith(f"{tmp_path}: Is a directory")


def test_settings_are_shown_and_changed(chat: Chat) -> None:
    lines = (
        "/set temperature 0",
        "/set max-new-tokens 2",
        "/set seed none",
        '/set stop "\\n"',
        "/set timeout 9",
        "/set repetition_penalty 1.3",
        "/set frequency-penalty -0.5",
        "a",
    )
    *found, answer = chat.json(*lines)
    want = (
        "max_new_tokens 2 temperature 0.0 top_k 0 top_p 0.95 min_p 0.0 repetition_penalty 1.3 "
        'presence_penalty 0.0 frequency_penalty -0.5 seed none stop "\\n" timeout 9.0'
    )
    assert found[-1]["text"].split() == want.split()
    assert answer["output_tokens"] == 2 and answer["finish_reason"] == "length" and not answer["full"]
    with fake_engine(tokenizer=letters()) as engine:
        penalties = dict(repetition_penalty=1.3, frequency_penalty=-0.5)
        greedy = engine.submit([OPEN, A, CLOSE, OPEN], Sampling(2, **penalties)).result().text
    assert answer["answer"] == greedy


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temperature nan", "sampling: temperature = nan"),
        ("/set temperature -1", "sampling: temperature = -1.0"),
        ("/set temperature inf", "sampling: temperature = inf"),
        ("/set temperature hot", "/set: temperature = 'hot'. Use a number."),
        ("/set top_p", "/set: top_p = ''. Use a number."),
        ("/set top_k 1.5", "/set: top_k = '1.5'. Use a whole number."),
        ("/set seed -1", "sampling: seed = -1"),
        ("/set max_new_tokens 0", "sampling: max_new_tokens = 0. Use 1 or more, or none."),
        ("/set timeout nan", "request: timeout_s = nan"),
        ("/set stop", "sampling: stop = ('',)"),
        ("/set temprature 1", "/set: there is no 'temprature'. The nearest is temperature."),
        ("/sytem b", "there is no /sytem. The nearest is /system."),
        ("/exot", "there is no /exot. The nearest is /exit."),
        ("/zzzzzz", "there is no /zzzzzz. There are /help, /clear, "),
    ],
)
def test_what_cannot_be_set_or_is_no_command_changes_nothing(chat: Chat, line: str, said: str) -> None:
    refused, after, answered = chat.json(line, "/set", "a")
    assert refused["error"].startswith(said)
    assert after["found"] == chat.json("/set")[0]["found"] and answered["answer"] == Expected().ask([A])


def test_errors_go_to_standard_error_and_the_rest_is_answered(chat: Chat) -> None:
    code, out, err = chat("/exot", "a", "/exit", "b")
    assert (code, out) == (2, Expected().ask([A]) + "\n")
    assert err == "octavo: there is no /exot. The nearest is /exit.\n"


def test_two_slashes_send_one(chat: Chat) -> None:
    assert chat.json("//a")[0]["answer"] == Expected().ask([TOKENS.index("/"), A])


def test_the_stats_add_up(chat: Chat) -> None:
    *answers, stats = chat.json("a", "b", "/stats")
    found, sums = stats["found"], ("prompt_tokens", "cached_tokens", "output_tokens")
    assert [found[name] for name in sums] == [sum(each[name] for each in answers) for name in sums]
    assert found["turns"] == found["answers"] == 2 and found["last"]["seed"] == SEED
    assert found["blocks_cached"][0] > 0 and found["evicted_blocks"] == 0
    share = round(100 * found["cached_tokens"] / found["prompt_tokens"])
    assert (
        f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens cached ({share}%)"
        in stats["text"]
    )


def test_a_full_context_is_said_and_the_conversation_stays_usable(chat: Chat) -> None:
    """64 tokens hold a turn or two of 20."""
    found = chat.json(*"abcabc", "/undo", "/undo", "a", "/clear", "a", max_context=64)
    refused = [each for each in found if "error" in each]
    assert refused and all(
        "the context holds 64. Make it shorter: /undo takes" in e["error"] for e in refused
    )
    assert all(each["error"].startswith("conversation: ") for each in refused)
    full = next(each for each in found if each.get("full"))
    assert full["finish_reason"] == "length" and full["prompt_tokens"] + full["output_tokens"] == 64
    assert "answer" in found[8] and found[10]["answer"] == Expected().ask([A])


def test_what_the_kv_cache_holds_bounds_an_answer_too(chat: Chat) -> None:
    """Two blocks: 32 tokens, and the last one is not written."""
    (found,) = chat.json("a", args=("--max-new-tokens", "200"), kv_blocks=2)
    assert found["full"] and found["prompt_tokens"] + found["output_tokens"] == 2 * BLOCK + 1
    refused = chat.json("abcdefgh" * 16, kv_blocks=2)[0]["error"]
    assert refused.startswith("conversation: ") and "this engine has 2 blocks of 16 tokens" in refused
    assert refused.endswith("; /undo takes the last turn back, and /clear begins anew.")


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (
            {"template": None},
            "any.octavo: its model has no chat template: it cannot chat. Continue a text with it ",
        ),
        (
            {"tokenizer": None},
            "any.octavo: it has no tokenizer: it cannot chat. Give token ids to runtime.generate",
        ),
        (
            {"template": "{{ raise_exception('no system role') }}"},
            "chat messages: the chat template refuses them",
        ),
    ],
)
def test_a_model_that_cannot_chat_says_what_can_be_done(
    chat: Chat, engine: dict[str, Any], said: str
) -> None:
    code, out, err = chat("a", **engine)
    assert (code, out) == (2, "") and err.startswith(f"octavo: {said}") and err.count("\n") == 1
    assert "octavo generate any.octavo" in err or "template" not in said or "refuses" in said


def session(**engine: Any) -> Session:
    made = fake_engine(tokenizer=letters(), max_context=4096, kv_blocks=256, **engine)
    return Session(made, Settings(max_new_tokens=60, seed=SEED, temperature=0.7, top_p=0.95))


def test_an_interrupt_stops_an_answer_and_keeps_what_came() -> None:
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    talk, before = session(), signal.getsignal(signal.SIGINT)
    with talk.engine:
        turn = talk.ask("a", show)
        assert turn.completion.finish_reason == "cancelled" and not turn.full
        assert talk.conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
        assert signal.getsignal(signal.SIGINT) is before
        assert talk.ask("b", lambda _: None).completion.cached_tokens >= len(pieces) // BLOCK * BLOCK


def test_a_second_interrupt_is_one() -> None:
    def show(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    talk = session()
    with talk.engine:
        with pytest.raises(KeyboardInterrupt):
            talk.ask("a", show)
        assert (
            talk.conversation.messages == () and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a"], "a"),
        (["  a b "], "a b"),
        (["a\\", "b\\", "c", "d"], "a\nb\nc"),
        (['"""', "a", "", "  b", '"""', "c"], "a\n\n  b"),
        (['"""a', 'b"""  '], "a\nb"),
        (['"""a"""'], "a"),
        (['""""""'], ""),
        (['"""a\\', 'b"""'], "a\\\nb"),
        (["a\\"], "a"),
        (['"""a', "b"], "a\nb"),
        ([""], ""),
    ],
)
def test_a_message_of_many_lines(lines: list[str], message: str) -> None:
    left, prompts = iter(lines), []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        for line in left:
            return line
        raise EOFError

    assert read_message(read) == message
    assert prompts[0] == ">>> " and set(prompts[1:]) <= {"... "}


def test_nothing_to_read_is_the_end() -> None:
    def read(prompt: str) -> str:
        raise EOFError

    with pytest.raises(EOFError):
        read_message(read)


IDS = st.lists(st.integers(0, VOCAB - 1), max_size=12)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_known_tokens_are_kept_and_the_text_stays(data: st.DataObject) -> None:
    """Over turns of a conversation of which some are taken back, with answers of any spelling."""
    tokenizer = letters()
    text = ["".join(TOKENS[i] for i in data.draw(IDS)) for _ in range(3)]
    spellings, known = Spellings(tokenizer.decode), [[SPECIAL]]
    whole = "<s>"
    for question in text:
        whole += f"[{question}]["
        ids = tokenizer.encode(whole, add_special_tokens=False)
        spelt = spellings.respelt(ids)
        assert tokenizer.decode(spelt) == tokenizer.decode(ids)
        assert spelt[: len(known[-1])] == known[-1]
        if data.draw(st.booleans()):  # taken back
            whole = whole.removesuffix(f"[{question}][")
            continue
        answer = data.draw(IDS)
        whole += "".join(TOKENS[i] for i in answer)
        known.append(spelt + answer)
        spellings.add(known[-1])
        whole += "]"


@pytest.mark.parametrize(
    "known",
    [
        [SPECIAL, OPEN, A, SPECIAL, B],  # one more, which was sampled and has no text
        [OPEN, A, B],
        [OPEN, SPECIAL, A, B],
        [SPECIAL + 1, OPEN, A, B],
        [SPECIAL, OPEN, A, C],
    ],
)
def test_what_is_spelt_with_other_special_tokens_is_another_conversation(known: list[int]) -> None:
    tokenizer = letters()
    spellings = Spellings(tokenizer.decode)
    spellings.add(known)
    ids = tokenizer.encode("<s>[ab]", add_special_tokens=False)
    assert spellings.respelt(ids) == ids == [SPECIAL, OPEN, AB, CLOSE]
    spellings.add([SPECIAL, OPEN, A, B])
    assert spellings.respelt(ids) == [SPECIAL, OPEN, A, B, CLOSE]


def test_a_character_of_several_tokens_is_kept_whole() -> None:
    """Tokens that are bytes: the first of a character decodes to as much text as all of it."""
    spellings = Spellings(lambda ids: bytes(ids).decode(errors="replace"))
    known = list("a\N{DRAGON}".encode())
    spellings.add(known)
    ids = list("a\N{DRAGON}b".encode())
    assert spellings.respelt(ids) == ids
    assert spellings._known == [known]  # found: a character that began otherwise is none
    assert spellings.respelt(list("a\N{DRAGON FACE}b".encode())) == list("a\N{DRAGON FACE}b".encode())
    assert spellings._known == []


CHILD = """\
import sys, time
import runtime
from compiler.cli.main import main
from tests.cli.test_chat import letters
from tests.runtime.fake import FakeExecutor, fake_engine

def slow(self, step, forward=FakeExecutor.forward):
    time.sleep(0.01)
    return forward(self, step)

FakeExecutor.forward = slow
runtime.load = lambda *_, **__: fake_engine(tokenizer=letters(), max_context=4096, kv_blocks=256)
try:
    main(["chat", "any.octavo", "--seed", "3"])
finally:
    heavy = {"torch", "transformers", "sympy", "onnx", "triton", "networkx", "compiler.driver"}
    print("imported:", *sorted(heavy & set(sys.modules)))
"""


class Typist:
    """A child on a terminal: waits for what it shows, and types."""

    def __init__(self, code: str, cache: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            env = {**os.environ, "TERM": "xterm", "OCTAVO_CACHE": str(cache), "NO_COLOR": "1", "DEBUG": "0"}
            os.execve(sys.executable, [sys.executable, "-c", code], env)
        self.seen = ""

    def until(self, text: str, timeout_s: float = 60, interrupt_s: float = 120) -> str:
        """What was shown up to this text, since the last time; nothing that long: Ctrl-C."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            left_s = min(interrupt_s, max(end - time.monotonic(), 0))
            if not select.select([self.fd], [], [], left_s)[0]:
                assert left_s == interrupt_s, self.seen
                self.type("\x03")
                continue
            try:
                self.seen += os.read(self.fd, 65536).decode()
            except OSError:  # the child has ended
                raise AssertionError(self.seen) from None
        found, _, self.seen = self.seen.partition(text)
        return found.replace("\r\n", "\n")

    def begun(self) -> None:
        """Once it shows some text after what was waited for, which stays to be found."""
        while not re.sub(r"\x1b(\[[?\d;]*[A-Za-z]?)?", "", self.seen).strip():
            assert select.select([self.fd], [], [], 60)[0], self.seen
            self.seen += os.read(self.fd, 65536).decode()

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def end(self) -> int:
        """The exit code, once it has ended: a closed terminal would end it."""
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_on_a_terminal(tmp_path: Path) -> None:
    """Typed, stopped with Ctrl-C, taken up again, edited, and ended with Ctrl-D."""
    child = Typist(CHILD, tmp_path)
    assert "any.octavo on fake, 4,096 tokens of context" in child.until(">>> ")
    child.type("ab\r")
    child.until("\n")
    child.begun()
    child.type("\x03")
    stopped = child.until(">>> ")
    assert "stopped; the conversation keeps what came\n" in stopped
    assert re.search(r" tokens/s, first after \d+\.\d", stopped)
    assert ", 0 of 4 prompt tokens reused" in stopped
    child.type("c\\\r")
    child.until("... ")
    child.type("a\r")
    child.until("\n")
    child.begun()
    child.type("\x03")
    assert " prompt tokens reused; stopped" in child.until(">>> ")
    child.type("half a line")
    child.until("half a line")
    time.sleep(0.3)
    child.type("\x03")
    child.until(">>> ", interrupt_s=10)  # missed between two waits for keys
    child.type("/unfo\x7f\x7fdo\r")  # edited
    assert "1 turn, the last message is the assistant's: " in child.until(">>> ")
    child.type("/sta\t\r")  # Tab
    assert "conversation: 1 turn, " in child.until(">>> ")
    child.type("\x04")
    assert child.until("imported:").strip() == "" and child.until("\n") == "\r"
    assert child.end() == 0
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600
