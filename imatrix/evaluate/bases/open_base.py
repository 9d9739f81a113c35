"""The base of an evaluation, opened: how each kind gets its text, its way through it, and its logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from gguf_tools.errors import BadArgument, BadRequest
from gguf_tools.files.inputs import InputWatch
from gguf_tools.findings import remark
from gguf_tools.format.values import Metadata
from gguf_tools.progress import Reporter
from imatrix.evaluate.bases.base import BaseWeights, ComputedBase, Entrant, Lockstep
from imatrix.evaluate.bases.cached_states import KeptBase, KeptFolder, StatesKeeper, about_states
from imatrix.evaluate.bases.logits_file import SMALLEST_LOG_PROB, FileLogits
from imatrix.evaluate.bases.same_model import KnownModel, ModelFacts
from imatrix.evaluate.figures import ALL
from imatrix.evaluate.options import SHORTEST_CHUNK, EvaluateOptions, LogitsFile
from imatrix.forward.device import choose_device
from imatrix.forward.layers.load import SharedWeights
from imatrix.forward.logits import predicted_positions
from imatrix.forward.network import LogitRule, Pooling
from imatrix.forward.open import ModelSource, open_model
from imatrix.forward.options import ForwardOptions
from imatrix.forward.run import ForwardPass, forward_pass, refuse_full_disk
from imatrix.forward.work_folder import EMBEDDING, WorkFolder, run_identity
from imatrix.forward.workers import threads_for
from imatrix.texts.chunks import Chunks
from imatrix.texts.mixture import read_text
from imatrix.texts.spelling import spelled
from imatrix.texts.suite import Suite
from imatrix.texts.tokenise import ClassChunks, tokenise
from imatrix.texts.tokens import Cut, Text, bos_of

Files = list[list[str]]
"""Name of each file of a model, and what it is recognised by."""


@dataclass(frozen=True)
class OpenBase(ABC):
    """An open base.

    watch        of the files that are read for it; None where none are
    source       its weights; None where they are not there
    is_computed  whether it goes through the text itself
    floor        of log probabilities, see DivergenceVisitor; None for logits
    """

    path: Path
    facts: ModelFacts
    options: EvaluateOptions
    watch: InputWatch | None
    source: ModelSource | None
    is_computed: ClassVar[bool] = False
    floor: ClassVar[float | None] = None

    @property
    def pooling(self) -> Pooling | None:
        """How a text gets a vector, where that is what the base is for."""
        return None if self.source is None else self.source.network.pooling

    @property
    def known(self) -> KnownModel:
        """The model, as far as it is known."""
        return KnownModel(self.path, self.facts, self.source)

    def read(self, texts: Suite | Path | None, vocab: Metadata) -> tuple[ClassChunks, ...]:
        """Read a suite, or a text alone, as the base's tokens.

        texts   None for the text of a file of logits
        vocab   that of a model that was made of the base
        raises  BadRequest for texts that can't be read, or of which nothing can be measured; BadTokenizer
                for a tokenizer that is not supported
        """
        if not isinstance(texts, Suite):
            if texts is None:
                raise BadArgument("no text; only a file of logits has its own")
            text = read_text(
                texts, vocab, self.facts.vocab_size, self.options.cut, passages=self.pooling is not None
            )
            alone = _alone(text, texts, texts.name, vocab)
            return (alone if self.pooling is None else replace(alone, chunks=text.scored_from(1)),)
        network = None if self.source is None or self.pooling is None else self.source.network
        longest = None if network is None else network.n_positions or network.trained_context or None
        size = self.facts.vocab_size
        classes = tokenise(texts, vocab, size, passages=network is not None, longest=longest)
        for each in classes:
            if each.name == ALL:
                raise BadRequest(f"class {ALL!r}: figures over all classes are called so; name it otherwise")
            if not each.chunks.n_scored:
                raise BadRequest(f"class {each.name!r}: no token is scored; are its chunks too short?")
        return classes

    @abstractmethod
    def begin(self, shared: SharedPass, models: Sequence[Entrant], folders: Sequence[Path]) -> Lockstep:
        """Begin the pass of all models; each resumes what its work folder has.

        folders  names of the work folders, that of the base first if it is computed
        """

    def refuse_changed(self) -> None:
        """Raise ChangedInput if files that were read for it have changed since it was opened."""
        if self.watch is not None:
            self.watch.refuse_changed()


@dataclass(frozen=True)
class SharedPass:
    """Context that the passes of all models of an evaluation share.

    opened  closes what is opened on the way
    """

    chunks: Chunks
    options: EvaluateOptions
    report: Reporter
    opened: ExitStack

    def passes(
        self,
        base: Files,
        models: Sequence[Entrant],
        folders: Sequence[Path],
        settle: Callable[[Sequence[WorkFolder]], None] = lambda works: None,
    ) -> list[ForwardPass]:
        """Return a forward pass for every model.

        They share threads, the budget for hidden states, and weights that are the same bytes.

        settle  is shown the work folders before anything is read from them
        """
        chunks, n_bytes = self.chunks, self.options.forward.memory_bytes // len(models)
        device = choose_device(self.options.forward.device)
        n_workers = self.opened.enter_context(threads_for(chunks.n_chunks, device))
        shared = SharedWeights(each.source.tensors for each in models)
        own = replace(self.options.forward, memory_bytes=n_bytes)
        options = [replace(own, rounded=each.rounded or own.rounded) for each in models]
        works = []
        for each, forward, folder in zip(models, options, folders, strict=True):
            watch = each.source.watch
            about = {"base": base, "model": watch.recognised_by(), **about_run(chunks, forward)}
            work = WorkFolder(folder, about, restart=self.options.restart, watch=watch)
            works.append(self.opened.enter_context(work))
        settle(works)
        places, sources = [work.folder for work in works], [each.source for each in models]
        refuse_full_disk(places, sources, chunks, own)
        return [
            self.opened.enter_context(
                forward_pass(each.source, chunks, forward, work, self.report.advance, n_workers, shared)
            )
            for each, forward, work in zip(models, options, works, strict=True)
        ]


def about_run(chunks: Chunks, forward: ForwardOptions) -> dict[str, Any]:
    """List what decides a model's numbers, besides the model itself."""
    return {
        **run_identity(chunks, forward),
        **({} if forward.like is None else {"like": forward.like}),
    }


@dataclass(frozen=True)
class ModelBase(OpenBase):
    """A model that goes through the text.

    kept  folder for its states; None where they are not kept
    """

    source: ModelSource
    kept: KeptFolder | None
    is_computed = True

    def read(self, texts: Suite | Path | None, vocab: Metadata) -> tuple[ClassChunks, ...]:
        return super().read(texts, self.source.vocab())

    def begin(self, shared: SharedPass, models: Sequence[Entrant], folders: Sequence[Path]) -> Lockstep:
        source, keeper, files = self.source, None, self.source.watch.recognised_by()
        if self.kept is not None:
            run = {"base": files, "name": self.path.name, **_about_text(shared.chunks, self.options)}
            about = about_states(self.facts, source.network.norm_eps, source.network.logits, run)
            if self.kept.about is not None:
                self.kept.refuse_another(about)
            positions = predicted_positions(shared.chunks)
            keeper = StatesKeeper(self.kept, positions, source.network.n_layers, about)
        entrants = Entrant(source), *models
        base, *others = shared.passes(files, entrants, folders, lambda works: _settle(works, keeper))
        computed = ComputedBase(base, keeper)
        weights = BaseWeights.of(source, shared.chunks, self.options.forward)
        return Lockstep(computed, computed.head, others, weights)


@dataclass(frozen=True)
class StoredBase(OpenBase):
    """A base whose states an earlier run has kept.

    about   what the kept states are of
    source  the base itself, whose weights tell which tensors of the worst layer are far off, if it is there
    """

    kept: KeptFolder
    about: Mapping[str, Any]

    def read(self, texts: Suite | Path | None, vocab: Metadata) -> tuple[ClassChunks, ...]:
        read = super().read(texts, vocab)
        chunks = Chunks.joined([text.chunks for text in read])
        files = self.about["run"]["base"] if self.source is None else self.source.watch.recognised_by()
        run = {"base": files, "name": self.path.name, **_about_text(chunks, self.options)}
        self.kept.refuse_another(about_states(self.facts, self.about["norm_eps"], self._rule, run))
        return read

    @property
    def _rule(self) -> LogitRule:
        return LogitRule(**self.about["logits"])

    def begin(self, shared: SharedPass, models: Sequence[Entrant], folders: Sequence[Path]) -> Lockstep:
        forward, facts = self.options.forward, self.about["facts"]
        base = KeptBase(
            path=self.path,
            folder=self.kept,
            positions=predicted_positions(shared.chunks),
            device=choose_device(forward.device),
            dtype=getattr(torch, forward.dtype),
            norm_eps=self.about["norm_eps"],
            rule=self._rule,
            n_layers=facts["n_layers"],
            hidden_size=facts["hidden_size"],
            vocab_size=facts["vocab_size"],
        )
        passes = shared.passes(self.about["run"]["base"], models, folders)
        if self.source is None:
            return Lockstep(base, base.head, passes)
        weights = BaseWeights.of(self.source, shared.chunks, forward)
        return Lockstep(base, base.head, passes, weights)


@dataclass(frozen=True)
class LogitsBase(OpenBase):
    """A file of log probabilities.

    files  tells what it is recognised by
    """

    logits: FileLogits
    files: Callable[[], Files]
    floor = SMALLEST_LOG_PROB

    def read(self, texts: Suite | Path | None, vocab: Metadata) -> tuple[ClassChunks, ...]:
        assert not isinstance(texts, Suite), "refused by the pipeline"
        text, cut = self.logits.text(bos_of(vocab)), self.options.cut
        if cut.chunk_size not in (text.chunk_size, Cut().chunk_size):
            raise BadRequest(f"{self.path}: chunks of {text.chunk_size} tokens, and -c {cut.chunk_size}")
        if texts is None:
            return (_alone(text, None, self.path.name, vocab),)
        cut = replace(cut, chunk_size=text.chunk_size, n_chunks=text.n_chunks)
        given = read_text(texts, vocab, self.logits.vocab_size, cut)
        if given.tokens.tolist() != text.tokens.tolist():
            raise BadRequest(f"{texts}: is not the text of {self.path}, whose tokens are others")
        return (_alone(given, texts, texts.name, vocab),)

    def begin(self, shared: SharedPass, models: Sequence[Entrant], folders: Sequence[Path]) -> Lockstep:
        return Lockstep(None, lambda: self.logits, shared.passes(self.files(), models, folders))


def _alone(text: Text, path: Path | None, name: str, vocab: Metadata) -> ClassChunks:
    """Describe a text alone; raises BadArgument for chunks of which nothing can be measured."""
    if text.chunk_size < SHORTEST_CHUNK:
        raise BadArgument(f"a context of {text.chunk_size} tokens, expected {SHORTEST_CHUNK} or more")
    return ClassChunks(name, name, text.chunks, text.sha256 or None, spelled(vocab), is_alone=True, path=path)


def open_base(base: Path | LogitsFile, options: EvaluateOptions, opened: ExitStack) -> OpenBase:
    """Open a base; states that were kept of it are used if they are whole.

    opened  closes it
    raises  BadRequest for options that a file of log probabilities does not go with
    """
    if isinstance(base, LogitsFile):
        if options.keep is not None or options.logits is not None:
            raise BadRequest(f"{base.path}: where a file of logits is the base, nothing is written or kept")
        if options.adapted(base.path) is not base.path:
            raise BadRequest(
                f"{base.path}: --lora needs a folder with the adapter's base, and this is a file"
            )
        watch = InputWatch([base.path])
        logits = FileLogits.open(base.path, options.cut.n_chunks)
        facts = ModelFacts(logits.vocab_size)
        return LogitsBase(base.path, facts, options, watch, None, logits, watch.recognised_by)
    kept = None
    if options.keep is not None:
        kept = opened.enter_context(closing(KeptFolder(options.keep, restart=options.restart)))
        if kept.damaged is not None:
            if not base.exists():
                raise BadRequest(
                    f"{kept.damaged}: missing, or not as it was written, and {base}, from which it could"
                    " be computed, doesn't exist"
                )
            remark(f"{kept.damaged}: missing, or not as it was written; computing the base again")
        elif kept.about is not None:
            is_needed = base.exists() or options.adapted(base) is not base
            source = (
                opened.enter_context(open_model(options.adapted(base), predicts=False)) if is_needed else None
            )
            facts = ModelFacts(**kept.about["facts"])
            read = None if source is None else source.watch
            return StoredBase(base, facts, options, read, source, kept, kept.about)
    source = opened.enter_context(open_model(options.adapted(base), predicts=False))
    return ModelBase(source.path, ModelFacts.of(source), options, source.watch, source, kept)


def _settle(works: Sequence[WorkFolder], keeper: StatesKeeper | None) -> None:
    """Have the base computed again where what others need of it is not there any more.

    works  of the base, then of the other models, which need its states after the layers that they lack
    """
    base, *others = works
    missing = None if keeper is None else keeper.gap(max(0, base.done + 1))
    if missing is not None:
        base.start_over(f"{missing}: missing, or not as it was written")
    elif base.done > max(EMBEDDING, min(work.done for work in others)) + 1:
        base.start_over(f"{base.folder}: ahead of the models that are compared with it")


def _about_text(chunks: Chunks, options: EvaluateOptions) -> dict[str, Any]:
    """List what decides kept states, besides the base; the device may be another one."""
    return {key: value for key, value in about_run(chunks, options.forward).items() if key != "device"}


def noise_entrants(base: OpenBase) -> tuple[Entrant, ...]:
    """Return the models that the noise floor is measured on: the base as other files of it would be.

    A file of rounded weights is left out where no weight changes: the base is BF16, or quantized.

    raises  BadRequest where the base's weights are not there
    """
    source = base.source
    if source is None:
        raise BadRequest(f"{base.path}: --noise-floor computes the base, but the base's weights don't exist")
    load = source.loader_for(replace(base.options.forward, rounded="weights"))
    loses = any(map(load.loses_bits, source.tensors.values()))
    return (Entrant(source, "activations"), *([Entrant(source, "weights")] if loses else []))
