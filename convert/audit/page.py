"""An audit as one self-contained page: no script, and nothing that is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convert.audit.report import AuditReport, TensorAudit, folded, where_text
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
@media (max-width: 760px) {
  .findings th { display: none; }
  .findings td { display: block; border: 0; padding: 0; min-width: 0; }
  .findings tr { display: block; padding: .3rem 0; border-bottom: 1px solid var(--grid); }
}
"""

_WIDEST = 8.0
"""Width of the longest bar, in em."""

_LEAST_SCALE = 2.0
"""The longest bar stands for this ratio or more, so that a file without faults has no long bars."""


def audit_page(report: AuditReport) -> str:
    """Return the page: the outcome, what was found, and every tensor's error, those of bad ones first."""
    outcome = "something is wrong" if report.is_wrong else "nothing is wrong"
    title = f"{report.file.name}: {outcome}"
    sections = [
        f"<h1>{html_text(title)}</h1>",
        f'<p class="note">{html_text(report.summary())}.</p>',
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
        "scroll findings",
        ("level", "where", "finding"),
        [
            f'<td><span class="level {each.level}">{each.level}</span></td>'
            f'<td class="name">{html_text(where_text(each))}</td><td class="text">{html_text(each.text)}</td>'
            for each in folded(report.findings)
        ],
        left=3,
    )


def _divergence(report: AuditReport) -> Iterator[str]:
    lines = "\n".join(map(html_text, report.divergence_lines()))
    if lines:
        yield "<h2>Divergence</h2>"
        yield f'<p class="passage">{lines}</p>'


def _tensors(tensors: Sequence[TensorAudit]) -> Iterator[str]:
    yield "<h2>Tensors</h2>"
    yield (
        '<p class="note">"error" is the relative error of the tensor. "encoder\'s" is the error that the'
        ' encoder of its type makes in the same weights without importances. "times" is the first divided by'
        " the second, also as a bar. Importances and calibration raise this quotient on purpose: they move"
        " errors to where the errors do less harm.</p>"
    )
    longest = max([_LEAST_SCALE, *map(_ratio, tensors)])
    rows = []
    for each in sorted(tensors, key=lambda each: not each.diagnoses):
        kind = "bar bad" if each.diagnoses else "bar"
        ratio = f"{each.relative / each.expected:.2f}" if each.expected else ""
        width = _WIDEST * _ratio(each) / longest
        rows.append(
            f'<td class="name">{html_text(each.name)}</td><td class="name">{each.type}</td>'
            f"<td>{each.relative:.3%}</td><td>{each.expected:.3%}</td><td>{ratio}</td>"
            f'<td class="name"><span class="{kind}" style="width: {width:.2f}em"></span></td>'
            f"<td>{each.cosine:.4f}</td><td>{each.n_rows_read:,} of {each.n_rows:,}</td>"
        )
    heads = ("tensor", "type", "error", "encoder's", "times", "", "cosine", "rows read")
    yield from _table("scroll", heads, rows, left=2)


def _ratio(tensor: TensorAudit) -> float:
    """Compute a tensor's error in units of its type's, at most 10."""
    return min(10.0, tensor.relative / tensor.expected) if tensor.expected else 0.0


def _table(style: str, heads: Sequence[str], rows: Sequence[str], *, left: int) -> Iterator[str]:
    yield f'<div class="{style}"><table><tr>'
    yield "".join(f"<th{' class=name' * (i < left)}>{head}</th>" for i, head in enumerate(heads)) + "</tr>"
    yield from (f"<tr>{row}</tr>" for row in rows)
    yield "</table></div>"
