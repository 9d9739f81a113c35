"""An audit as one self-contained page: no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convert.audit.report import AuditReport, TensorAudit, folded, where_text
from gguf_tools.hub.names import folder_name
from gguf_tools.text import html_text
from gguf_tools.web_page import page_html

_OWN_STYLE = """\
td.text { white-space: normal; min-width: 18rem; max-width: 46rem; text-align: left;
  overflow-wrap: anywhere; }
td.name, th.name { text-align: left; }
.level { display: inline-block; min-width: 5.5em; font-weight: 600; }
.bad { color: var(--bad); } .warning { color: var(--warning); } .note { color: var(--muted); }
.bar { display: inline-block; height: .6em; background: var(--series-0); border-radius: 2px; }
.bar.bad { background: var(--bad); }
"""

_WIDEST = 8.0
"""Width of the longest bar, in em."""


def audit_page(report: AuditReport) -> str:
    """Return the page: the outcome, what was found, and every tensor's error, those of bad ones first."""
    outcome = "something is wrong" if report.is_wrong else "nothing is wrong"
    title = f"{report.file.name}: {outcome}"
    sections = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="note">Compared with {html_text(folder_name(report.base))}:'
        f" {html_text(report.summary())}.</p>",
        *_findings(report),
        *_divergence(report),
        *_tensors(report.tensors),
    ]
    return page_html(title, sections, _OWN_STYLE)


def _findings(report: AuditReport) -> Iterator[str]:
    if not report.findings:
        return
    yield "<h2>Findings</h2>"
    yield from _table(
        ("level", "where", "finding"),
        [
            f'<td><span class="level {each.level}">{each.level}</span></td>'
            f'<td class="name">{html_text(where_text(each))}</td><td class="text">{html_text(each.text)}</td>'
            for each in folded(report.findings)
        ],
        left=2,
    )


def _divergence(report: AuditReport) -> Iterator[str]:
    lines = "\n".join(map(html_text, report.divergence_lines()))
    if lines:
        yield "<h2>Divergence</h2>"
        yield f'<p class="passage">{lines}</p>'


def _tensors(tensors: Sequence[TensorAudit]) -> Iterator[str]:
    yield "<h2>Tensors</h2>"
    yield (
        '<p class="note">The relative error of each tensor, and what its type makes of the same weights'
        " without importances. Importances and calibration raise the plain error on purpose: they move it"
        " to where it does less harm. A bar is the error in units of the type's.</p>"
    )
    longest = max((_ratio(each) for each in tensors), default=1.0)
    rows = []
    for each in sorted(tensors, key=lambda each: not each.diagnoses):
        kind = "bar bad" if each.diagnoses else "bar"
        width = _WIDEST * _ratio(each) / longest if longest else 0.0
        rows.append(
            f'<td class="name">{html_text(each.name)}</td><td class="name">{each.type}</td>'
            f"<td>{each.relative:.3%}</td><td>{each.expected:.3%}</td><td>{each.cosine:.4f}</td>"
            f"<td>{each.n_rows_read:,} of {each.n_rows:,}</td>"
            f'<td class="name"><span class="{kind}" style="width: {width:.2f}em"></span></td>'
        )
    yield from _table(("tensor", "type", "error", "type's", "cosine", "rows read", ""), rows, left=2)


def _ratio(tensor: TensorAudit) -> float:
    """Compute a tensor's error in units of its type's, at most 10."""
    return min(10.0, tensor.relative / tensor.expected) if tensor.expected else 0.0


def _table(heads: Sequence[str], rows: Sequence[str], *, left: int) -> Iterator[str]:
    yield '<div class="scroll"><table><tr>'
    yield "".join(f"<th{' class=name' * (i < left)}>{head}</th>" for i, head in enumerate(heads)) + "</tr>"
    yield from (f"<tr>{row}</tr>" for row in rows)
    yield "</table></div>"
