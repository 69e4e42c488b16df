"""What the simulated model says and what it counts: words from a hash of the request, and tokens from its text.

The documents around the words are left to ``answers.py`` and ``responses.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from proxy.simulator.reply import Refusal

if TYPE_CHECKING:
    from proxy.simulator.script import Script

DEFAULT_TOKENS = 16
_MOST_CHOICES = 128

_WORD_LIST = (
    "water river gate stone level channel basin weir lock current bank spring "
    "rain cloud delta flow ebb tide lake pond brook bridge mill wheel "
    "turn open close rise fall wait pass hold carry reach lead follow "
    "slow quick calm deep clear cold warm bright quiet broad narrow steady "
    "over under through along between toward after before while until beyond across "
    "each every some many"
)
_WORDS = [" " + word for word in _WORD_LIST.split()]
_PADDING = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Facts:
    """What an answer is made from besides the request: its number, Unix time in whole seconds, and the script."""

    number: int
    created: int
    script: Script


@dataclass(frozen=True, slots=True)
class Wording:
    """The words for one prompt. Each is one token; all but the first begin with a space."""

    seed: bytes

    @classmethod
    def of(cls, model: str, text: str) -> Wording:
        """The same model and text always give the same words."""
        return cls(hashlib.sha256(f"{model}\0{text}".encode("utf-8", "surrogatepass")).digest())

    def tokens(self, count: int, choice: int = 0) -> list[str]:
        """The first ``count`` tokens of the given choice."""
        seed, size = self.seed, len(_WORDS)
        words = [_WORDS[(seed[at & 31] + (at >> 5) * 7 + choice * 13) % size] for at in range(count)]
        if words:
            words[0] = words[0].strip().capitalize()
        return words


def identifier(prefix: str, facts: Facts, wording: Wording) -> str:
    """An id made of the words' hash and the request's number, so that repeated requests differ."""
    return f"{prefix}{wording.seed.hex()[:20]}{facts.number:08x}"


@lru_cache(maxsize=256)
def fingerprint(model: str) -> str:
    """``system_fingerprint``: one per model."""
    return "fp_" + hashlib.sha256(model.encode("utf-8", "surrogatepass")).hexdigest()[:10]


def obfuscation(token: str) -> str:
    """Padding that gives the records of a stream one length, as OpenAI does against traffic analysis."""
    return _PADDING[: max(1, 16 - len(token))]


def token_count(size_bytes: int) -> int:
    """Four bytes of text make a token; there is always one."""
    return max(1, -(-size_bytes // 4))


def size_of(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def text_of(content: object) -> str:
    """The text of a message: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, dict))
    return "".join(part for part in parts if isinstance(part, str))


def prompts_of(value: object, param: str) -> list[tuple[str, int]]:
    """Text and token count of each prompt in a string, list of strings, list of token ids, or list of such lists."""
    if isinstance(value, str):
        return [(value, token_count(size_of(value)))]
    if isinstance(value, list) and value:
        if all(isinstance(item, int) for item in value):
            return [(repr(value), len(value))]
        if all(isinstance(item, str) for item in value):
            return [(item, token_count(size_of(item))) for item in value]
        if all(isinstance(item, list) and item and all(isinstance(token, int) for token in item) for item in value):
            return [(repr(item), len(item)) for item in value]
    raise Refusal(
        400,
        f"'$.{param}' is invalid. Please check the API reference: https://platform.openai.com/docs/api-reference.",
        param=param,
    )


def model_of(payload: dict[str, Any], default: str | None = None) -> str:
    """The model that the request names."""
    model = payload.get("model", default)
    if not isinstance(model, str) or not model:
        raise Refusal(400, "you must provide a model parameter")
    return model


def emitted(payload: dict[str, Any], script: Script, *limits: str) -> tuple[int, bool]:
    """How many tokens each choice has, and whether a limit in the request made them fewer."""
    wanted = DEFAULT_TOKENS if script.tokens is None else script.tokens
    given = [limit for name in limits if (limit := _positive(payload, name)) is not None]
    count = min([wanted, *given])
    return count, count < wanted


def choices_of(payload: dict[str, Any]) -> int:
    """The member ``n``, 1 by default."""
    count = _positive(payload, "n") or 1
    if count > _MOST_CHOICES:
        raise Refusal(400, f"Invalid 'n': integer above maximum value. Expected a value <= {_MOST_CHOICES}.", param="n")
    return count


def _positive(payload: dict[str, Any], name: str) -> int | None:
    value = payload.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Refusal(400, f"Invalid '{name}': expected an integer of at least 1.", param=name)
    return value


def with_usage(document: dict[str, Any], usage: dict[str, Any], script: Script) -> dict[str, Any]:
    """The document with the usage that the script wants: the true one, another, or none."""
    if script.usage is None:
        document["usage"] = usage
    elif script.usage != "none":
        document["usage"] = script.usage
    return document
