"""A loop without a model, for tests of the server: what it says, when it fails and how long it takes is given."""

import collections
import dataclasses
import itertools
import time

from scalejax.data.text.tokenizer import ByteTokenizer
from scalejax.errors import UserError
from scalejax.inference.requests import Chunk, Stats, TokenLogprobs
from scalejax.inference.text import Writer

TEXT = "The quick brown fox jumps over the lazy dog. "


class ChatBytes(type(ByteTokenizer().build())):
    """Bytes with a template that writes "role:content|", as those of Hugging Face have."""

    def render_chat(self, messages, *, reply="open", variables=None, now=None):
        del variables, now
        for message in messages:
            if message["content"] == "refuse me":
                raise UserError("its chat template refuses these messages: no.")
        text = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        return "<|bos|>" + text + ("assistant:" if reply == "open" else "")


def writer(tokenizer=None):
    tokenizer = ChatBytes() if tokenizer is None else tokenizer
    return Writer(None, tokenizer, (256,), (257,))


@dataclasses.dataclass
class _Row:
    request: object
    text: bytes
    made: int = 0
    over: bool = False


class FakeLoop:
    """Continues every prompt with `text`, `block` tokens a step; sample s begins at its s-th character.

    A prompt with the word "nan" has an error after `good` tokens, one with "crash" raises out of the step, and that of
    one with "late" begins at the 10th.
    """

    max_positions = 4096
    vocabulary = 320

    def __init__(self, *, text=TEXT, slots=8, block=1, delay=0.0, good=3, endless=False):
        self.text, self.slots, self.block, self.delay, self.good = text.encode(), slots, block, delay, good
        self.endless = endless
        self.waiting = collections.OrderedDict()
        self.running = {}
        self.numbers = itertools.count()
        self.steps = 0
        self.counted = collections.Counter()
        self.cancelled = []
        self.requests = []

    def warm_up(self):
        self.counted["compilations"] = 0

    def check(self, request):
        if not request.prompt:
            raise UserError("prompt is empty.")
        longest = len(request.prompt) + request.max_tokens
        if longest > self.max_positions:
            raise UserError(f"prompt and max_tokens make {longest}, at most {self.max_positions} fit.")
        if request.samples > self.slots:
            raise UserError(f"samples={request.samples} are more than {self.slots} slots.")
        assert request.max_tokens > 0 or request.prompt_logprobs is not None

    def submit(self, request):
        self.check(request)
        number = next(self.numbers)
        self.waiting[number] = request
        self.requests.append(request)
        return number

    def cancel(self, number, sample=None):
        self.cancelled.append(number if sample is None else (number, sample))
        if sample is not None:
            self.running[number][sample].over = True
        if sample is None or all(row.over for row in self.running[number]):
            self.waiting.pop(number, None)
            self.running.pop(number, None)

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    @property
    def stats(self):
        used = sum(len(rows) for rows in self.running.values())
        names = ("prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens", "preemptions", "compilations")
        counted = {name: self.counted[name] for name in names}
        return Stats(running=used, waiting=len(self.waiting), kv_usage=used / self.slots, **counted)

    def step(self):
        self.steps += 1
        time.sleep(self.delay)
        chunks = []
        while self.waiting:
            number, request = next(iter(self.waiting.items()))
            if sum(len(rows) for rows in self.running.values()) + request.samples > self.slots:
                break
            del self.waiting[number]
            if b"crash" in self.said(request):
                raise RuntimeError("the device is gone")
            self.counted["prompt_tokens"] += len(request.prompt)
            starts = range(10, 11) if b"late" in self.said(request) else range(request.samples)
            self.running[number] = [_Row(request, self.text[s:] + self.text[:s]) for s in starts]
        for number, rows in list(self.running.items()):
            for sample, row in enumerate(rows):
                if not row.over:
                    chunks.append(self.advance(number, sample, row))
            if all(row.over for row in rows):
                del self.running[number]
        return chunks

    @staticmethod
    def said(request):
        return bytes(token for token in request.prompt if token < 256)

    def advance(self, number, sample, row):
        request = row.request
        prompt_logprobs = None
        if row.made == 0 and request.prompt_logprobs is not None:
            prompt_logprobs = (None, *(logprobs(token, request.prompt_logprobs) for token in request.prompt[1:]))
        if b"nan" in self.said(request) and row.made >= self.good:
            row.over = True
            return Chunk(number, sample, (), ended="error", message="the model's logits are not finite.")
        left = request.max_tokens - row.made
        text = row.text * (2 + (row.made + self.block) // len(row.text)) if self.endless else row.text
        new = tuple(text[row.made : row.made + min(self.block, left)])
        row.made += len(new)
        self.counted["generation_tokens"] += len(new)
        ended = "length" if row.made >= request.max_tokens else "stop" if row.made >= len(text) else None
        row.over = ended is not None
        its = () if request.logprobs is None else tuple(logprobs(token, request.logprobs) for token in new)
        return Chunk(number, sample, new, its, prompt_logprobs, ended)


def logprobs(token, top):
    """-0.5 for the token itself, which is the most probable, and less for those behind it."""
    return TokenLogprobs(token, -0.5, tuple(((token + n) % 256, -0.5 - n) for n in range(top)))
