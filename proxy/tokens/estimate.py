"""How many tokens a request will probably use, from the members of its JSON body: never a tokenizer, never an exception.

Decides numbers only; what they cost a limit is ``limits/limiter.py``'s affair. Text counts as UTF-8 bytes / 4, which for
English is close and for most other scripts too high: settling corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

BYTES_PER_TOKEN = 4
DEFAULT_COMPLETION_TOKENS = 256
LEGACY_COMPLETION_TOKENS = 16  # OpenAI's documented default of /completions
IMAGE_TOKENS = 765  # one 1024 x 1024 image in high detail
LOW_DETAIL_IMAGE_TOKENS = 85
AUDIO_TOKENS = 500  # half a minute or so
FILE_TOKENS = 1000
MOST_TOKENS = 10**13  # more than any limit's capacity, and exact in a double

_TEXT_MEMBERS = ("messages", "prompt", "input", "instructions", "tools", "functions", "response_format", "text")
_COMPLETION_MEMBERS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_PART_TOKENS = {
    "image_url": IMAGE_TOKENS,
    "input_image": IMAGE_TOKENS,
    "input_audio": AUDIO_TOKENS,
    "file": FILE_TOKENS,
    "input_file": FILE_TOKENS,
}
# What the flat figure of such a part stands for; text in its other members counts as anywhere.
_PAYLOAD_MEMBERS = frozenset({"image_url", "input_audio", "file", "file_data", "file_id", "file_url", "detail"})
_NUMBERS = frozenset({int, float})
_TEXTUAL = frozenset({str, list, dict})
_FEW_VALUES = 10_000  # cost nothing to build
_MOST_VALUES = 100_000  # in all members together; beyond it, they are not built to be measured
_MOST_LISTS = 50_000  # of numbers
MOST_STRINGS = 200_000  # in a body, names included
_LARGE_BYTES = 2**22  # where a wide character would make a string that takes four times the memory
_SPACES = b" \t\r\n"
_NUMERIC = b"0123456789+-.eE[]," + _SPACES
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{},"'))
_NARROW = bytes(range(128)) + b"x" * 128
WITHOUT_COMPLETION = frozenset({"/embeddings", "/moderations", "/responses/input_tokens"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens expected. ``is_completion_stated``: the client itself bounded the completion.

    ``is_guess_of_size``: the text could not be read, so the bytes of the members were taken instead.
    """

    prompt_tokens: int
    completion_tokens: int
    is_completion_stated: bool
    is_guess_of_size: bool = False

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


NOTHING = Estimate(0, 0, is_completion_stated=True)


def estimate(endpoint: str, members: Mapping[str, msgspec.Raw]) -> Estimate:
    """Estimate a request to ``endpoint`` (path below /v1) from the raw members of its body."""
    prompt_tokens, is_guess = _prompt_tokens(members)
    if endpoint in WITHOUT_COMPLETION:
        return Estimate(prompt_tokens, 0, is_completion_stated=True, is_guess_of_size=is_guess)
    bounds = [bound for name in _COMPLETION_MEMBERS if (bound := _positive(members.get(name))) is not None]
    each = bounds[0] if bounds else LEGACY_COMPLETION_TOKENS if endpoint == "/completions" else DEFAULT_COMPLETION_TOKENS
    choices = max(_positive(members.get("n")) or 1, _positive(members.get("best_of")) or 1)
    return Estimate(prompt_tokens, min(each * choices, MOST_TOKENS), is_completion_stated=bool(bounds), is_guess_of_size=is_guess)


def _prompt_tokens(members: Mapping[str, msgspec.Raw]) -> tuple[int, bool]:
    size_bytes, tokens, is_guess, values_left = 0, 0, False, _MOST_VALUES
    for name in _TEXT_MEMBERS:
        raw = members.get(name)
        if raw is None:
            continue
        text = bytes(raw)
        numbers = _numbers_in(text)
        if numbers is not None:
            tokens += numbers
            continue
        values = _values_in(text)
        measured = _measure_text(text) if values <= values_left else None
        values_left -= values if measured else 0
        is_guess = is_guess or measured is None
        text_bytes, part_tokens = measured or (len(text), 0)
        size_bytes += text_bytes
        tokens += part_tokens
    return max(1, -(-size_bytes // BYTES_PER_TOKEN) + tokens), is_guess


def _numbers_in(text: bytes) -> int | None:
    """How many numbers a large list of numbers, or of lists of them, has; None for anything else."""
    commas = text.count(b",")
    if commas <= _FEW_VALUES or not text.startswith(b"[") or text.count(b"[") > _MOST_LISTS or text.translate(None, _NUMERIC):
        return None
    # One more than commas, but for empty lists.
    return commas + 1 - text.translate(None, _SPACES).count(b"[]")


def _values_in(text: bytes) -> int:
    """What the text costs to build, at most: its values, where a list or an object counts twice."""
    values = _structure(text)
    if values > _FEW_VALUES:
        outside = outside_strings(text)
        values = _MOST_VALUES + 1 if outside is None else _structure(outside)
    return values


def _structure(text: bytes) -> int:
    return text.count(b",") + 2 * (text.count(b"[") + text.count(b"{"))


def _measure_text(text: bytes) -> tuple[int, int] | None:
    if len(text) > _LARGE_BYTES and not text.isascii():
        text = text.translate(_NARROW)  # byte for byte: lengths are the same
    try:
        return _measure(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError):  # such as 1e400, which the upstream may well accept
        return None


def outside_strings(text: bytes) -> bytes | None:
    """Brackets, braces and commas of a JSON text that stand outside its strings; None beyond ``MOST_STRINGS`` of these.

    For another text the result means nothing. Works by whole-text passes: the regular expression for a string is far slower.
    """
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, _NO_STRUCTURE)
    if text.count(b'"') > 2 * MOST_STRINGS:
        return None
    return b"".join(text.split(b'"')[::2])


def _measure(value: Any) -> tuple[int, int]:
    """Bytes of text, and tokens that are known otherwise, in a message, a part, or any nesting of them."""
    size_bytes, tokens = 0, 0
    pending = [value]
    while pending:
        current = pending.pop()
        kind = type(current)
        if kind is str:
            size_bytes += len(current) if current.isascii() else len(current.encode())
        elif kind is list:
            if _NUMBERS.issuperset(map(type, current)):
                tokens += len(current)
            else:
                pending += current
        elif kind is dict:
            flat = _flat_tokens(current)
            tokens += flat
            passed_over = _PAYLOAD_MEMBERS if flat else ()
            pending += [
                member
                for name, member in current.items()
                if type(member) in _TEXTUAL and name != "type" and name not in passed_over
            ]
        elif kind in _NUMBERS:
            tokens += 1
    return size_bytes, tokens


def _flat_tokens(value: dict[str, Any]) -> int:
    """The figure for a part that holds an image, audio or a file; 0 for any other object, a message among them."""
    part = value.get("type")
    if not isinstance(part, str) or part not in _PART_TOKENS or "role" in value:
        return 0
    tokens = _PART_TOKENS[part]
    return LOW_DETAIL_IMAGE_TOKENS if tokens == IMAGE_TOKENS and _is_low_detail(value) else tokens


def _is_low_detail(part: dict[str, Any]) -> bool:
    image = part.get("image_url")
    return (image if isinstance(image, dict) else part).get("detail") == "low"


def _positive(raw: msgspec.Raw | None) -> int | None:
    """The member as a whole number above zero; None where it is absent or something else (the upstream will say so)."""
    if raw is None:
        return None
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        return None
    return int(min(value, MOST_TOKENS))
