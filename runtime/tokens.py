"""Text to tokens and back: prompts, output as it is generated, and where a generation ends."""

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from profiles.errors import InputError, UnsupportedError
from runtime.chat_template import render_chat
from runtime.model_spec import TokenizerSpec

Message = Mapping[str, str]
"""One turn of a conversation: ``role`` (``system``, ``user``, ``assistant``) and ``content``."""
Prompt = str | Sequence[Message]
"""A text, or the messages of a conversation."""

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_LEVEL = (["ByteLevel"], ["ByteLevel", "Fuse"])
_PIECE_BY_PIECE = frozenset({"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"})


class _Decoder(msgspec.Struct, frozen=True):
    """The part of ``tokenizer.json`` that says how tokens become text."""

    type: str
    decoders: tuple["_Decoder", ...] = ()
    stop: int = 0
    """Characters that a ``Strip`` takes from the end."""


class _Document(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None


class Tokens:
    """A tokenizer with what the model expects around a prompt; see ``from_files``."""

    def __init__(self, tokenizer: Tokenizer, spec: TokenizerSpec, byte_level: bool) -> None:
        # A tokenizer.json may carry the limits of somebody's training run
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.spec = spec
        self.byte_level = byte_level
        """Tokens stand for bytes, whatever their neighbours are."""
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(spec.eos_ids)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_files(cls, source: Path | str, spec: TokenizerSpec) -> "Tokens":
        """A tokenizer from the path of ``tokenizer.json``, or from its text if given a string.

        Raises InputError, naming the file, if it is missing or no tokenizer, and UnsupportedError
        if its text cannot be streamed. Whether it is the file that ``spec.digest`` means is for
        the plan's loader to check.
        """
        where = source if isinstance(source, Path) else "tokenizer.json"
        try:
            text = source.read_bytes().decode() if isinstance(source, Path) else source
            tokenizer = Tokenizer.from_str(text)
            document = msgspec.json.decode(text, type=_Document)
        except OSError as error:
            raise InputError(f"cannot read: {error.strerror}", where=where) from error
        except Exception as error:  # the tokenizers library raises bare Exception
            raise InputError(f"not a tokenizer: {error}", where=where) from error
        return cls(tokenizer, spec, _is_byte_level(document.decoder, where))

    def encode_prompt(
        self, prompt: Prompt, chat: bool = False, system: str | None = None
    ) -> list[int]:
        """The ids of a prompt, with BOS once if the model wants it.

        ``chat`` puts a text into the chat template as what the user says; a list of messages is
        put there in any case. ``system`` comes before them as a message of its own. Control tokens
        that are spelled out in the text count as control tokens.

        Raises InputError for a prompt without tokens or with unpaired surrogates, a model without
        chat template, a template that fails, malformed messages, and ``system`` without chat.
        """
        if chat or not isinstance(prompt, str):
            text = self._render(conversation(prompt, system))
        elif system is not None:
            raise InputError("a system message needs the chat template", hint="ask for chat")
        else:
            text = prompt
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not Unicode text: {error.reason}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        bos = self.spec.bos_id
        if self.spec.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if not ids:
            raise InputError("the prompt has no tokens", hint="give some text")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens; broken UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def finish(self, ids: Sequence[int]) -> int | None:
        """Index of the first token of ``ids`` that ends the generation, None if none does."""
        return next((index for index, token in enumerate(ids) if token in self._eos_ids), None)

    def control_id(self, text: str) -> int | None:
        """The special token that is spelled ``text``, None if there is none."""
        token = self._tokenizer.token_to_id(text)
        return token if token in self._special_ids else None

    def is_silent(self, token: int) -> bool:
        """Whether ``token`` never shows in text: it is special or unknown."""
        return token in self._special_ids or self._tokenizer.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether ``token`` is a byte that its neighbours may complete to a character."""
        return _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def bytes_of(self, token: int) -> bytes:
        """What ``token`` adds to the text of a byte-level tokenizer."""
        known = self._bytes_of.get(token)
        if known is None:
            piece = self._tokenizer.id_to_token(token)
            known = b"" if piece is None or self.is_silent(token) else _piece_bytes(piece)
            self._bytes_of[token] = known
        return known

    def _render(self, messages: Sequence[Message]) -> str:
        template = self.spec.chat_template
        if template is None:
            raise InputError(
                "the model has no chat template",
                hint="prompt it with plain text, without chat (`plan run --no-chat`)",
            )
        eos = self.spec.eos_ids[0] if self.spec.eos_ids else None
        return render_chat(
            template,
            messages,
            bos_token=self._spelling(self.spec.bos_id),
            eos_token=self._spelling(eos),
        )

    def _spelling(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.id_to_token(token) or ""


class StreamDecoder:
    """Turns tokens into text as they come; the pieces together equal ``Tokens.decode`` of all.

    No piece ends within a character. The work per token does not grow with the text: a byte-level
    tokenizer needs the bytes of an unfinished character; any other one needs the last token that
    was shown, since the first token of a decoded text may lose its space.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown_chars = 0
        """Of the window's text."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; may be empty."""
        if self._tokens.byte_level:
            return self._utf8.decode(b"".join(map(self._tokens.bytes_of, ids)))
        return "".join(map(self._push_piece, ids))

    def pending(self) -> str:
        """What ``flush`` would give of finished characters; nothing changes."""
        if self._tokens.byte_level:
            return ""
        return self._tokens.decode(self._window)[self._shown_chars :]

    def flush(self) -> str:
        """What was held back, an unfinished character as U+FFFD; then starts afresh."""
        text = self._utf8.decode(b"", final=True) + self._show()
        self._utf8.reset()
        self._window, self._shown_chars = [], 0
        return text

    def _push_piece(self, token: int) -> str:
        if self._tokens.is_silent(token):
            return ""
        self._window.append(token)
        # One wrong byte voids the whole run of byte tokens that it is in
        if self._tokens.is_byte(token):
            return ""
        text = self._show()
        # Only a token that shows on its own can stand for all that came before it
        if alone := self._tokens.decode([token]):
            self._window, self._shown_chars = [token], len(alone)
        return text

    def _show(self) -> str:
        text = self._tokens.decode(self._window)
        new = text[self._shown_chars :]
        self._shown_chars = len(text)
        return new


def conversation(prompt: Prompt, system: str | None = None) -> list[Message]:
    """The messages of a prompt, each with ``role`` and ``content``; a text is what the user says.

    Raises InputError for what is no list of messages, and for two system messages.
    """
    messages: list[Message] = []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages.extend(prompt)
    if not messages:
        raise InputError("the conversation has no messages", hint="say something as the user")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            value: object = message.get(key) if isinstance(message, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
            if not isinstance(value, str):
                raise InputError(
                    "not a message",
                    where=f"messages[{index}]",
                    found=f"{key} {value!r}",
                    expected='such as {"role": "user", "content": "Hi"}',
                )
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise InputError("the conversation has a system message already", hint="give it once")
    return [{"role": "system", "content": system}, *messages]


def _is_byte_level(decoder: _Decoder | None, where: object) -> bool:
    """True for byte-level, False for piece by piece; UnsupportedError for any other decoder."""
    steps = [] if decoder is None else list(decoder.decoders) or [decoder]
    names = [step.type for step in steps]
    if names in _BYTE_LEVEL:
        return True
    # Once fused, a replacement could reach over tokens
    reaches_over = "Fuse" in names and "Replace" in names[names.index("Fuse") :]
    looks_ahead = any(step.stop for step in steps)
    if not _PIECE_BY_PIECE.issuperset(names) or reaches_over or looks_ahead:
        raise UnsupportedError(
            "cannot stream the text of this tokenizer's decoder",
            where=where,
            found=" + ".join(names),
            expected=f"ByteLevel, or some of {', '.join(sorted(_PIECE_BY_PIECE))}",
        )
    return False


def _byte_alphabet() -> dict[str, int]:
    """Characters that stand for bytes: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece)
    # An added token, which is spelled as it reads
    return piece.encode()
