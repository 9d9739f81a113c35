"""Outputs: filled in any order, each published as soon as it is whole, resumed after an interruption.

Beside the first output lies a journal of the chunks that are done (see gguf_tools/journal.py). A run that
fails or is killed leaves it and the partials; the same run again, and no other, resumes from there.

Where the layout has a place for provenance (see provenance.py), it is filled in when all chunks of all
outputs are done, so the first output, which has it, comes last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools.journal import Journal, journal_path
from gguf_tools.progress import Progress, no_progress
from gguf_tools.writer import PARTIAL_SUFFIX, refuse_inputs
from quantize.fill.chunks import CHUNK_ELEMS, ChunkTable, ChunkTask
from quantize.fill.encode import FillJob
from quantize.fill.executors import make_executor
from quantize.fill.fingerprint import describe_run
from quantize.fill.options import FillOptions
from quantize.fill.precompile import Encoding, compile_all
from quantize.fill.reuse import OldFiles, OldTensor, Reuse
from quantize.fill.session import Output, Session
from quantize.fill.verify import Verification, merge_verifications


@dataclass(frozen=True)
class Written:
    """What `write_outputs` has done.

    n_chunks         of all outputs
    n_resumed        of these, how many an earlier run had done
    reused           how many tensors came from which older file
    notes            what a user should know about the older files
    compile_seconds  how long it took to load or compile the kernels
    verification     what a check of the outputs found, None without one
    calibration      what there is to say of the calibration
    """

    n_chunks: int
    n_resumed: int
    reused: Mapping[Path, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    calibration: tuple[str, ...] = ()
    compile_seconds: float = 0.0


def write_outputs(
    outputs: Iterable[Output],
    job: FillJob,
    inputs: Iterable[Path],
    options: FillOptions,
    progress: Progress = no_progress,
) -> Written:
    """Fill all `outputs` and publish each when it is whole.

    inputs    files that are being read, which no output may replace; it may replace those it reuses
    options   how to fill them; see reuse.py and verify.py
    progress  called with the bytes of every chunk, from any thread
    raises    ExecutionError for the first chunk that fails, OutputError for a file that can't be written and
              for leftovers of another run; what is done stays for the next run
    """
    outputs, inputs = tuple(outputs), tuple(inputs)
    refuse_inputs(journal_path(outputs[0].path), inputs)
    table = ChunkTable.of([output.layout for output in outputs], job.rows_per_weights(), CHUNK_ELEMS)
    about = describe_run({output.path.name: output.layout for output in outputs}, job, inputs)
    with ExitStack() as stack:
        old = stack.enter_context(OldFiles(map(Path, options.reuse), outputs[0].layout.endian))
        for output in outputs:
            refuse_inputs(output.path.with_name(output.path.name + PARTIAL_SUFFIX), old.paths)
        journal = stack.enter_context(Journal(outputs[0].path, about, restart=options.restart))
        session = Session(outputs, table, job, journal, progress, verify=options.verify)
        try:
            session.open_outputs(inputs, stack)
            n_resumed = len(journal.done)
            reused = Reuse(old, session, job, journal.done)
            began = time.monotonic()
            compile_all(_encodings(session, job, reused), options.threads, options.compiling)
            compiled = time.monotonic()
            session.publish_whole()
            executor = make_executor(options.threads)
            reused.run(executor)
            spec = session.spec()
            executor.run(_missing(session, job, calibrated=False), spec, session.done)
            if job.calibrator is not None:
                job.calibrator.run(_missing(session, job, calibrated=True), spec.partials, session.done)
            session.finish()
        except BaseException as error:
            session.keep(error)
            raise
        journal.remove()
    return Written(
        table.n_chunks,
        n_resumed,
        reused=reused.counts,
        notes=(*old.notes, *(_damage_note(tensor) for tensor in reused.damaged)),
        compile_seconds=compiled - began,
        verification=merge_verifications(session.checked) if options.verify else None,
        calibration=() if job.calibrator is None else tuple(job.calibrator.lines()),
    )


def _missing(session: Session, job: FillJob, *, calibrated: bool) -> Iterator[ChunkTask]:
    """Yield the chunks that are not done, of calibrated tensors or of all others."""
    return (task for task in session.missing() if job.is_calibrated(task.rows.tensor) is calibrated)


def _encodings(session: Session, job: FillJob, reused: Reuse) -> Iterable[Encoding]:
    """Yield how each tensor will be encoded, of those that certainly will be."""
    for chunks in session.incomplete():
        name, type_ = chunks.info.name, chunks.info.type
        made = job.is_encoded(name, type_) and not job.is_calibrated(name)
        if made and name not in reused.candidates:
            yield Encoding.of(job, name, type_)


def _damage_note(tensor: OldTensor) -> str:
    return f"{tensor.path}: {tensor.info.name} is damaged; it was made anew"
