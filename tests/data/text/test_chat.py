"""A chat template is a stranger's program: what it may take, and that others do not notice what it does."""

import datetime
import gc
import os
import pathlib
import signal
import threading

import pytest

from scalejax.data.text import chat
from scalejax.data.text.chat import ChatTemplate
from scalejax.errors import UserError

pytest.importorskip("jinja2", reason="needs the extra llm")

MESSAGES = [{"role": "user", "content": "x"}]
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture
def made():
    """Makes templates and ends their processes."""
    templates = []

    def make(source):
        templates.append(ChatTemplate(source, "theirs/chat_template.jinja"))
        return templates[-1]

    yield make
    for template in templates:
        template.close()


def pid_of(template):
    return template._child._process.pid


def is_there(pid):
    """Also as a zombie."""
    return pathlib.Path(f"/proc/{pid}").exists()


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
SAID = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {% generation %}\n"
    "        {%- set mark = 'inner' %}{{ message.content }}{{ '!' }}\n"
    "        {% endgeneration %}\n"
    "    {%- else %}[{{ message.content }}]{% endif %}\n"
    "{%- endfor %}{{ mark }}"
)
DATE = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %H:%M') }}{% else %}26 Jul 2024{% endif %}"
NOW = datetime.datetime(2026, 3, 4, 5, 6)


def test_what_transformers_adds_to_jinja_is_rendered_as_there(made):
    """By the documents of its chat templates; the texts are worked out by hand."""
    source = "|".join(
        [
            SAID,
            "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
            DATE,
            "{{ {'b': '<é>', 'a': 1} | tojson }}",
            "{{ '<é>' | tojson(true) }}{{ '<é>' | tojson(ensure_ascii=True) }}",
            "{{ {'b': [1, 2], 'a': 1} | tojson(separators=(',', ':'), sort_keys=true) }}",
            "{{ {'b': 1} | tojson(indent=1) }}",
            "{{ {'b': 1} | tojson(false, 2) }}",
            "{{ tools is none and documents is none }}",
        ]
    )
    want = [
        # Names set within a block stay there, lines of blocks alone leave nothing.
        "[hi]yo!\n",
        "hi",
        "yo",
        "04 Mar 2026, 05:06",
        '{"b": "<é>", "a": 1}',
        '"<\\u00e9>"' * 2,
        '{"a":1,"b":[1,2]}',
        '{\n "b": 1\n}',
        '{\n  "b": 1\n}',
        "True",
    ]
    assert made(source).render(TALK, reply="none", now=NOW).split("|") == want


def test_without_a_time_a_template_takes_its_fixed_date(made):
    assert made(DATE).render(TALK) == "26 Jul 2024"
    with pytest.raises(UserError, match="'strftime_now' is undefined"):
        made("{{ strftime_now('%Y') }}").render(TALK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.first.role }}", "UndefinedError"),
        ("{{ " + "(" * 10**5 + " }}", "no valid Jinja"),
        ("{{ 'a' * 10**10 }}", "more than the 512 MiB of memory"),  # folded when it is compiled
        ("{{ 'a' * (messages | length * 10**10) }}", "more than the 512 MiB of memory"),
        ("{% set ns = namespace(x='a') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "512 MiB"),
        ("{% for a in range(9999) %}{{ 'é' * 10**3 }}{% endfor %}", "more than the 8 MiB of text"),
        ("{{ raise_exception('a' * 10**7) }}", "refuses these messages: aaa"),
    ],
)
def test_what_a_template_may_not_is_one_message_and_leaves_nothing(made, monkeypatch, source, words):
    monkeypatch.setattr(chat, "SECONDS", 20.0)  # on a busy machine 512 MiB are not filled within one
    is_refused_twice(made(source), words)


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_one_message_and_leaves_nothing(made):
    is_refused_twice(made(LOOPS), "longer than the 1 s")


def is_refused_twice(template, words):
    for _ in range(2):
        with pytest.raises(UserError) as error:
            template.render(MESSAGES)
        assert str(error.value).startswith("theirs/chat_template.jinja: its chat template ")
        assert words in str(error.value)
        assert len(str(error.value)) < 1000
    template.close()
    assert not [pid for pid in children() if not is_running(pid)]


def children():
    return [int(pid) for path in pathlib.Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def is_running(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_texts_up_to_the_limit_are_whole(made, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 60)  # of a machine that is busy
    (message,) = MESSAGES
    content = "é" * (chat.TEXT_BYTES // 2)
    template = made("{{ messages[0].content }}{{ more }}")
    assert template.render([message | {"content": content}]) == content
    with pytest.raises(UserError, match="more than the 8 MiB of text"):
        template.render([message | {"content": content}], variables={"more": "a"})
    assert template.render(MESSAGES) == "x"


@pytest.mark.slow
def test_a_process_is_kept_and_replaced_after_a_breach(made):
    template = made("{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}{{ messages[0].content }}")
    assert template.render(MESSAGES) == "x"
    first = pid_of(template)
    assert template.render([{"role": "user", "content": "y"}]) == "y"
    assert pid_of(template) == first
    with pytest.raises(UserError, match="longer than the 1 s"):
        template.render([{"role": "user", "content": "loop"}])
    assert not is_there(first)
    assert template.render(MESSAGES) == "x"
    second = pid_of(template)
    assert second != first
    os.kill(second, signal.SIGKILL)  # between two texts, by the system for example
    template._child._process.wait()
    assert template.render(MESSAGES) == "x"
    third = pid_of(template)
    template.close()
    assert not is_there(third)


def test_a_process_goes_with_its_template():
    template = ChatTemplate("a", "theirs")
    assert template.render(MESSAGES) == "a"
    pid = pid_of(template)
    del template
    gc.collect()
    assert not is_there(pid)


@pytest.mark.slow
def test_a_process_ends_with_its_parent_even_inside_of_a_loop(made):
    template = made("{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}")
    template.render(MESSAGES)
    process = template._child._process
    process.stdin.close()
    assert process.wait(30) == 0
    template.render(MESSAGES)
    process = template._child._process
    process.stdin.write(chat._line({"variables": {"messages": [{"role": "user", "content": "loop"}]}}))
    process.stdin.close()
    assert process.wait(30) == -signal.SIGALRM


def test_the_process_has_no_jax_no_environment_and_the_limit(made, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = made("a")
    template.render(MESSAGES)
    here = pathlib.Path(f"/proc/{pid_of(template)}")
    mapped = (here / "maps").read_text()
    assert "python" in mapped
    assert "numpy" not in mapped
    assert "jaxlib" not in mapped
    assert b"HF_TOKEN" not in (here / "environ").read_bytes()
    (line,) = [line for line in (here / "limits").read_text().splitlines() if line.startswith("Max address space")]
    assert line.split()[3:5] == [str(2**29)] * 2


def test_threads_get_their_own_texts(made):
    template = made("{{ messages[0].content }}")
    got = {}

    def ask(name):
        got[name] = [template.render([{"role": "user", "content": f"{name} {i}"}]) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: [f"{n} {i}" for i in range(20)] for n in range(8)}


READY = (
    'import sys\nsys.stdin.readline()\nprint(\'{"kind": "ready", "value": ""}\', flush=True)\nsys.stdin.readline()\n'
)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (READY + "print('[1')", "does not answer in the form"),
        (READY + 'print(\'{"kind": 3, "value": null}\')', "does not answer in the form"),
        (READY + "print('[' * 10**6)", "does not answer in the form"),
        (READY + "import os; os.abort()", "ended the process that renders it .SIGABRT.*512 MiB"),
        (READY + "sys.exit(9)", "ended the process that renders it .status 9"),
        ("import sys; sys.exit(9)", "does not start .*status 9"),
    ],
)
def test_a_process_that_fails_is_one_message(made, tmp_path, monkeypatch, program, words):
    (tmp_path / "child.py").write_text(program)
    monkeypatch.setattr(chat, "_PROGRAM", tmp_path / "child.py")
    with pytest.raises(UserError, match=words):
        made("a").render(MESSAGES)


class Interrupted:
    """A pipe from which Ctrl-C takes the first line's reader away."""

    def __init__(self, pipe):
        self.close, self._lines = pipe.close, [pipe.readline]

    def readline(self, limit):
        if self._lines:
            self._line = self._lines.pop()
            raise KeyboardInterrupt
        return self._line(limit)


def test_an_answer_that_was_not_waited_for_is_nobody_else_s(made):
    template = made("{{ messages[0].content }}")
    template.render(MESSAGES)
    template._child._process.stdout = Interrupted(template._child._process.stdout)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "of before"}])
    assert template.render(MESSAGES) == "x"


def test_contents_are_data_and_whatever_json_holds(made):
    content = "{{ 1/0 }}{% for %}\n<é>\ud800\x00"
    assert made("{{ messages[0].content }}").render([{"role": "user", "content": content}]) == content
    assert made("{{ messages[0].more }}").render([{"role": "user", "more": [1, None, {"a": 2.5}]}]) == (
        "[1, None, {'a': 2.5}]"
    )
    with pytest.raises(UserError, match=r"must hold what JSON can hold .*bytes"):
        made("a").render([{"role": "user", "content": b"x"}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "f: must be a list of at least one message; got {}"),
        ([], "f: must be a list of at least one message; got []"),
        (["a"], "f: messages[0] must be an object; got 'a'"),
        ([*MESSAGES, {"content": "a"}], "messages[1].role must be one of system, developer, user, assistant, tool"),
        ([{"role": "wizard", "content": "a"}], "got 'wizard'"),
        ([{"role": ["user"], "content": "a"}], "got ['user']"),
        ([{"role": "user", "content": None}], "messages[0].content must be text; got None"),
    ],
)  # fmt: skip
def test_messages_of_users_are_checked(content, words):
    with pytest.raises(UserError) as error:
        chat.read_messages(content, "f")
    assert words in str(error.value)
    assert chat.read_messages(MESSAGES, "f") == MESSAGES
