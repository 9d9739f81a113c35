"""A run from whatever its source is: a GGUF file is quantized, a folder converted in the same pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.checkpoint.streamed import StreamedFolder
    from quantize.mla_layout.names import MLALayout
    from quantize.options import QuantizeOptions
    from quantize.plan.recipe_files import Mixture
    from quantize.roles import Program
    from quantize.run import Run


def plan_source(
    source: Path | StreamedFolder,
    output: Path | None,
    file_type: str | Mixture,
    options: QuantizeOptions,
    *,
    mla: MLALayout | None = None,
    program: Program | None = None,
    allow_problems: bool = False,
) -> AbstractContextManager[Run]:
    """Plan a run; see `plan_run` of `convert.pipeline` for folders, and of `quantize.pipeline` for files.

    options         `keep_split` and `kv_overrides` are of a file alone
    mla, program    of a folder alone; see ConvertOptions
    allow_problems  yield even a run that can't be executed; its plan says why
    """
    if not Path(source).is_dir():
        from quantize.pipeline import plan_run as plan_file

        return plan_file(Path(source), output, file_type, options, allow_problems=allow_problems)
    from convert.options import ConvertOptions
    from convert.pipeline import plan_run as plan_folder

    folder = ConvertOptions(
        outtype=file_type,
        importances=options.importances,
        types=options.types,
        provenance=options.provenance,
        calibration=options.calibration,
        mla=mla,
        program=program,
    )
    return plan_folder(source, output, folder, allow_problems=allow_problems)
