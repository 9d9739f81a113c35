"""Templates compiled as by transformers, in jinja2's sandbox, with marks around the assistant's words."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from gguf_tools.errors import BadRequest
from gguf_tools.scanning.templates.rendering import Sandbox
from gguf_tools.text import shown
from imatrix.texts.templates import Template


def compile_template(template: Template, marks: tuple[str, str], date: datetime) -> Any:
    """Compile a template.

    marks   put before and after what the template says is the model's own
    date    what the template is told that the day is
    raises  BadRequest for what is no template
    """

    class Marked(Extension):
        """The block `generation`, put between marks."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in marks)
            return [begin, *body, end]

    try:
        return Sandbox(Marked, lambda: date).from_string(template.source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line is not None else ""
        raise BadRequest(f"{template.name} template{place}: {shown(' '.join(str(error).split()))}") from error
    except RecursionError as error:
        raise BadRequest(f"{template.name} template: is nested too deeply") from error
    except Exception as error:  # jinja2 checks only some of what it is given, and Python's compiler the rest
        why = " ".join(str(getattr(error, "msg", error)).split()) or type(error).__name__
        raise BadRequest(f"{template.name} template: can't be compiled: {shown(why)}") from error
