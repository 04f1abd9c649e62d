"""Whether a model can draft for another: the ids that both have must mean the same."""

from typing import NamedTuple

from tokenizers import Tokenizer

from lowering.source import ModelSource
from profiles.errors import IncompatibleError
from runtime.tokens import Tokens

_HINT = "take a draft model of the same family, or compile without --draft"


class _Vocabulary(NamedTuple):
    """What the ids of one model stand for."""

    name: str
    tokens: Tokens
    plain: Tokenizer
    """For pieces as they are stored."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    size: int
    """Ids that the model has logits for."""

    def piece(self, token: int) -> str | None:
        """As stored; None for an id that is only padding."""
        return self.plain.id_to_token(token) if token < self.size else None

    def text(self, token: int) -> bytes:
        """What the token is in text; a control token as it is spelled."""
        piece = self.piece(token) or ""
        if self.tokens.byte_level and not self.tokens.is_silent(token):
            return self.tokens.bytes_of(token)
        return piece.encode()


def check_draft(target: ModelSource, draft: ModelSource) -> None:
    """``IncompatibleError`` unless ``draft`` means by every id what ``target`` means by it.

    Ids that either lacks are fine: one vocabulary may be longer or padded otherwise. So are control
    tokens that differ in spelling, and entries that their own tokenizer never makes of their text
    (padding that has a name), as long as neither model begins or ends a text with them. Chat
    templates may differ: the target's is the one that is used.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours.tokens.byte_level is not theirs.tokens.byte_level:
        raise IncompatibleError(
            "the draft model's tokens are of another kind than the target's",
            where=theirs.name,
            found=_kind(theirs),
            expected=_kind(ours),
            hint=_HINT,
        )
    bounds = {ours.bos_id, theirs.bos_id, *ours.eos_ids, *theirs.eos_ids} - {None}
    differing = [
        token
        for token in range(min(ours.size, theirs.size))
        if _differ(ours, theirs, token) and (token in bounds or not _control(ours, theirs, token))
    ]
    unmade = _never_made(ours, differing) | _never_made(theirs, differing)
    differing = [token for token in differing if token in bounds or token not in unmade]
    if differing:
        first = differing[0]
        what = "BOS or EOS" if first in bounds else "text"
        raise IncompatibleError(
            f"the draft model's tokens are not the target's: {len(differing)} ids differ, the "
            f"first, {what}, is {first}",
            where=theirs.name,
            found=repr(theirs.text(first)),
            expected=f"{ours.text(first)!r}, as in {ours.name}",
            hint=_HINT,
        )


def _vocabulary(source: ModelSource) -> _Vocabulary:
    text, spec = source.tokenizer_json(), source.spec
    return _Vocabulary(
        spec.name,
        Tokens.from_files(text, spec.tokenizer),
        Tokenizer.from_str(text),
        spec.tokenizer.bos_id,
        spec.tokenizer.eos_ids,
        spec.vocab,
    )


def _differ(ours: _Vocabulary, theirs: _Vocabulary, token: int) -> bool:
    one, other = ours.piece(token), theirs.piece(token)
    return one is not None and other is not None and one != other


def _control(ours: _Vocabulary, theirs: _Vocabulary, token: int) -> bool:
    return ours.tokens.is_silent(token) and theirs.tokens.is_silent(token)


def _never_made(vocabulary: _Vocabulary, ids: list[int]) -> set[int]:
    """Those of ``ids`` whose own text gives other tokens; half a character has no text."""
    texts: dict[int, str] = {}
    for token in ids:
        try:
            texts[token] = vocabulary.text(token).decode()
        except UnicodeDecodeError:
            continue
    encoded = vocabulary.plain.encode_batch(list(texts.values()), add_special_tokens=False)
    return {token for token, made in zip(texts, encoded, strict=True) if made.ids != [token]}


def _kind(vocabulary: _Vocabulary) -> str:
    return "byte by byte" if vocabulary.tokens.byte_level else "pieces of text"
