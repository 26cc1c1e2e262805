"""Makes Markdown reference pages of the public C++ headers, for tools/docs_site.py.

A page has the opening comment of its header, then one section for each class, enum and group of
functions. Comments become prose; declarations become code. Private members and macros are left out.
"""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass, field

SKIPPED = ("#", "namespace ", "}  // namespace", "template <>")
INTO = re.compile(
    r"^(?:template <.*>\s*)?(class|struct|enum class|enum)\s+(?:PENSTOCK_API\s+)?(\w+)"
)
CALL = re.compile(r"([~\w]+|operator\S+)\(")
PAGE, LINK = re.compile(r"docs/([\w\\]+)\.md"), r"[docs/\1.md](../../\1.md)"
DESTRUCTOR = re.compile(r"(virtual )?~\w+\(\)")
VALUE = re.compile(r"(\w+)(?:\[[^]]*\])?\s*(?:=|;|\{)")


@dataclass
class Chunk:
    """A comment and the declarations that follow it without an empty line."""

    comment: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)


def chunks(lines: list[str]) -> list[Chunk]:
    """A comment begins a chunk unless it is inside a declaration; so does a line after a gap."""
    found: list[Chunk] = []
    depth, gap = 0, True
    for line in lines:
        text = line.strip()
        if not text:
            gap = gap or depth == 0
        elif depth == 0 and text.startswith("//"):
            if gap or not found or found[-1].code:
                found.append(Chunk())
            found[-1].comment.append(text[2:])
            gap = False
        else:
            if (gap and depth == 0) or not found:
                found.append(Chunk())
            found[-1].code.append(line)
            bare = re.sub(r'"(?:\\.|[^"\\])*"|//.*', "", line)
            depth += bare.count("{") + bare.count("(") - bare.count("}") - bare.count(")")
            gap = False
    return found


def prose(comment: list[str]) -> str:
    """Comment lines as Markdown: lines indented by two or more are code."""
    parts: list[str] = []
    code = False
    for line in comment:
        indented = line.startswith("   ") or (code and not line.strip())
        if indented != code:
            parts.append("\n```cpp" if indented else "```\n")
            code = indented
        parts.append(line[3:] if indented else PAGE.sub(LINK, escaped(line.strip())))
    if code:
        parts.append("```")
    return "\n".join(parts).replace("\n\n```\n", "\n```\n").strip() + "\n"


def escaped(text: str) -> str:
    spans = re.split(r"(`[^`]*`)", text)
    plain = (re.sub(r"([\\<*_\[\]#])", r"\\\1", span) for span in spans[::2])
    return "".join(a + b for a, b in zip(plain, [*spans[1::2], ""], strict=True))


def fenced(code: list[str]) -> str:
    lead = min((len(line) - len(line.lstrip()) for line in code if line.strip()), default=0)
    body = "\n".join(line[lead:].replace("PENSTOCK_API ", "") for line in code)
    return f"```cpp\n{body}\n```\n"


def name_of(code: list[str]) -> str:
    """Returns the name of a group of declarations for the table of contents."""
    names: list[str] = []
    joined = " ".join(line.split("//")[0].strip() for line in code)
    for part in re.sub(r"\{[^{}]*\}", ";", joined).split(";"):
        if part.strip().startswith(("using ", "class ", "struct ")):
            found = re.match(r"(?:using|class|struct)\s+(\w+)", part.strip())
        else:
            found = CALL.search(part) or VALUE.search(part + ";")
        if found and found[1] not in names:
            names.append(found[1])
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def public_body(code: list[str], kind: str) -> list[str]:
    """Returns the public lines between a class's braces."""
    text = "\n".join(code)
    body = text[text.index("{") + 1 : text.rindex("}")].splitlines()
    visible, kept = kind == "struct", []
    for line in body:
        label = line.strip()
        if label in ("public:", "private:", "protected:"):
            visible = label != "private:"
        elif visible and not DESTRUCTOR.match(label):
            kept.append(line)
    return kept


def section(chunk: Chunk) -> str:
    text = " ".join(line.strip() for line in chunk.code)
    found = INTO.match(text)
    if not found or "{" not in text:
        title = name_of(chunk.code)
        return f"## {escaped(title)}\n\n{fenced(chunk.code)}\n{prose(chunk.comment)}"
    kind, name = found[1], found[2]
    parts = [f"## {kind} {escaped(name)}\n", prose(chunk.comment)]
    if kind != "class":
        parts.append(fenced(chunk.code))
        return "\n".join(parts)
    bases = re.search(r":((?: public [\w:]+,?)+) \{", text)
    if bases:
        parts.append(f"Derives from `{bases[1].replace('public ', '').strip()}`.\n")
    parts += [of_member(member) for member in chunks(public_body(chunk.code, kind))]
    return "\n".join(parts)


def of_member(member: Chunk) -> str:
    """A comment above several declarations stays above them; above one it becomes prose."""
    if len([line for line in member.code if ";" in line.split("//")[0]]) > 1:
        lead = member.code[0][: len(member.code[0]) - len(member.code[0].lstrip())]
        return fenced([f"{lead}//{line}" for line in member.comment] + member.code)
    return (fenced(member.code) if member.code else "") + "\n" + prose(member.comment)


def page(header: pathlib.Path) -> str:
    """The page of one header."""
    lines = header.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#include <penstock")]
    start = next((i for i, line in enumerate(lines) if line.startswith("//")), len(lines))
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("//")), len(lines))
    opening = [line[2:] for line in lines[start:end]]
    rest, inside = [], False
    for line in lines[end:]:
        if line.startswith("#define"):
            inside = line.endswith("\\")
        elif inside:
            inside = line.endswith("\\")
        elif not line.startswith(SKIPPED):
            rest.append(line)
    parts = [f"# {header.parent.name}/{header.name}\n", *head, prose(opening)]
    forward = re.compile(r"^(class|struct) \w+;$")
    for chunk in chunks(rest):
        chunk.code = [line for line in chunk.code if not forward.match(line) and line != "}"]
        if chunk.code:
            parts.append(section(chunk))
    return "\n".join(parts)
