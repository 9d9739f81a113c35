"""Whether two things are of the same model: one answer for whatever compares them, or makes one of the other.

Divergences mean something where both give the same token the same number. So tokens, what text becomes of
them, special tokens and sizes must be the same. What may differ: layers that are left out, padding, the
layout of latent attention, names of tokens that only fill the vocabulary up, kinds of added tokens, and keys
that other converters leave out. `convert.audit.metadata` has a row for each key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from convert.audit.metadata import identity_findings
from gguf_tools.errors import AnotherModel
from gguf_tools.findings import Finding, Level, Tell
from gguf_tools.format import keys
from gguf_tools.format.values import Metadata
from imatrix.forward.open import ModelSource
from quantize.padding.counterparts import without_padding
from quantize.padding.hidden_size import n_hidden_zeros

_NEAR = 0.01
"""Bits per weight by which a file may exceed its base: others count padding otherwise."""

_RECORDED = (keys.TOKENIZER_MODEL, keys.TOKENIZER_MERGES, keys.TOKENIZER_BOS_ID, keys.TOKENIZER_EOS_ID)
"""Keys of which a digest is kept with a base that may be gone."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts that models made of one base have in common; None where a base doesn't say.

    hidden_size  columns of hidden states, those of zeros too
    tokens       digest of the vocabulary's tokens
    n_zeros      columns of zeros behind hidden states, where the size is padded
    digests      other key of the tokenizer -> digest of its value
    """

    vocab_size: int
    n_layers: int | None = None
    hidden_size: int | None = None
    tokens: str | None = None
    n_zeros: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def real_size(self) -> int | None:
        """Columns of hidden states without padding."""
        return None if self.hidden_size is None else self.hidden_size - self.n_zeros

    @classmethod
    def of(cls, source: ModelSource) -> ModelFacts:
        vocab, network = source.vocab(), source.network
        tokens = vocab.get(keys.TOKENIZER_TOKENS)
        digests = {key: _digest([str(vocab[key].data)]) for key in _RECORDED if key in vocab}
        return cls(
            network.vocab_size, network.n_layers, network.state_size,
            _digest(() if tokens is None else tokens.data), n_hidden_zeros(source.metadata), digests,
        )  # fmt: skip


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()


@dataclass(frozen=True)
class KnownModel:
    """Model that others are compared with, as far as it is known.

    source  None where it is gone, or only its logits are there
    """

    path: Path
    facts: ModelFacts
    source: ModelSource | None

    @classmethod
    def of(cls, source: ModelSource) -> KnownModel:
        return cls(source.path, ModelFacts.of(source), source)

    def admit(self, models: Sequence[ModelSource], tell: Tell) -> None:
        """Refuse models that are not of this one, and tell what is odd about the others.

        raises  AnotherModel, with the key, what was found and what was expected
        """
        for model in models:
            findings = [*self._findings(model)]
            for each in findings:
                if each.is_bad:
                    what = ", ".join(each.about)
                    raise AnotherModel(
                        f"{model.path}: {what}: {each.text}; it is of another model than {self.path}:"
                        " name the base that it was made of"
                    )
                tell(each)
        self._tell_swapped(models, tell)

    def _findings(self, model: ModelSource) -> Iterator[Finding]:
        """Yield how a model differs; BAD where that makes it another one."""
        own, facts = self.facts, ModelFacts.of(model)
        for key, what, wanted, found in (
            ("token_embd.weight", "tokens in the vocabulary", own.vocab_size, facts.vocab_size),
            ("token_embd.weight", "columns of hidden states", own.real_size, facts.real_size),
        ):
            if wanted not in (None, found):
                yield Finding("sizes", f"{found} {what}, the base has {wanted}", Level.BAD, (key,))
        if self.source is not None:
            yield from self._key_findings(_identity(model), _identity(self.source), model.path)
        elif own.tokens not in (None, facts.tokens):
            yield Finding("metadata", _OTHERS, Level.BAD, (keys.TOKENIZER_TOKENS,))
        else:
            for key in own.digests.keys() & facts.digests.keys():
                if own.digests[key] != facts.digests[key]:
                    yield Finding("metadata", _OTHERS, Level.BAD, (key,))
        if own.n_layers not in (None, facts.n_layers):
            text = f"{model.path}: {facts.n_layers} layers, and {self.path} has {own.n_layers}"
            yield Finding("layers", f"{text}: layers are not compared", Level.NOTE)

    def _key_findings(self, found: Metadata, wanted: Metadata, path: Path) -> Iterator[Finding]:
        """Yield what makes a model another one, and one note on all other differences."""
        findings = [*identity_findings(found, wanted, str(path))]
        yield from (each for each in findings if each.is_bad)
        harmless = [key for each in findings if not each.is_bad for key in each.about]
        if harmless:
            text = f"{path}: {', '.join(harmless)} differ from {self.path}, not in what a token is"
            yield Finding("metadata", f"{text} (gguf-tools audit tells more)", Level.NOTE, tuple(harmless))

    def _tell_swapped(self, models: Sequence[ModelSource], tell: Tell) -> None:
        """Tell of a quantized base that has fewer bits than what is compared with it."""
        base = self.source
        if base is None or not any(each.type.is_quantized for each in base.tensors.values()):
            return
        more = [each for each in models if each.bits_per_weight > base.bits_per_weight + _NEAR]
        if more:
            text = (
                f"{base.path}, the base, has {base.bits_per_weight:.2f} bits per weight, and {more[0].path}"
                f" has {more[0].bits_per_weight:.2f}: are they swapped?"
            )
            tell(Finding("swapped", text))


_OTHERS = "is not the base's"


def _identity(source: ModelSource) -> Metadata:
    """Return the keys that tell a model, with sizes without padding."""
    real = without_padding(source.metadata, source.infos).metadata(source.metadata)
    return {**real, **source.vocab()}
