"""The page of the types in the signatures of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import griffe
from griffe import Class, Object
from site_reference import at, entries, first_line, linked, literal, target

# Types of other packages that signatures name.
TYPES = {
    "numpy.typing.ArrayLike": "A numpy array, or what numpy makes one of: a number, nested lists, "
    "a tensor on the CPU.",
    "numpy.typing.DTypeLike": "A dtype of numpy, or what numpy makes one of, like `float` or "
    '`"int32"`.',
    "numpy.typing.NDArray": "A numpy array with the dtype in brackets.",
    "torch.Tensor": "A tensor of torch.",
    "torch.nn.Module": "A module of torch.",
    "torch.optim.Optimizer": "An optimizer of torch.",
}


def types() -> str:
    """Return a page of the types in signatures that are no public names."""
    lines = ["# Types", "", "The types in the signatures of the [reference](index.md).", ""]
    public = {thing.path for thing in entries().values()}
    found = {path: [text] for path, text in TYPES.items()}
    for path in sorted({name for thing in entries().values() for name in named_types(thing)}):
        if path.startswith("tagi_ddp.") and (kind := at(path)).path not in public:
            text = " ".join(filter(None, [definition(kind), first_line_or_none(kind)]))
            text += attributes(kind)
            if text:
                found.setdefault(kind.path, [text]).append(path)
    for path, (text, *others) in sorted(found.items(), key=lambda each: name_of(each[0]).lower()):
        aliases = [f"[](){{#{other}}}" for other in others if other != path]
        lines += [*aliases, f"## {name_of(path)} {{#{path}}}", "", text, ""]
    return "\n".join(lines)


def name_of(path: str) -> str:
    """Return the last part of a path."""
    return path.rpartition(".")[2]


def named_types(thing: Object) -> Iterator[str]:
    """Yield the paths of the types in the signature of an object."""
    annotations: list[Any] = []
    if isinstance(thing, Class):
        thing = target(thing.all_members["__init__"]) if "__init__" in thing.all_members else thing
    if isinstance(thing, griffe.Function):
        annotations = [thing.returns, *(each.annotation for each in thing.parameters)]
    elif isinstance(thing, griffe.Attribute):
        annotations = [thing.annotation]
    for annotation in annotations:
        if isinstance(annotation, griffe.Expr):
            for part in annotation.iterate(flat=True):
                if isinstance(part, griffe.ExprName):
                    yield part.canonical_path


def definition(kind: Object) -> str | None:
    """Return what a name of a type stands for; None for variables of types, and for classes."""
    value = getattr(kind, "value", None)
    if value is None or str(value).startswith("TypeVar("):
        return None
    return f"Another name for `{value}`."


def first_line_or_none(kind: Object) -> str | None:
    """Return the first paragraph of a docstring, if there is one."""
    return linked(literal(first_line(kind)), ("tagi_ddp",)) if kind.has_docstring else None


def attributes(kind: Object) -> str:
    """Return a list of the attributes that the docstring of a class describes."""
    sections = kind.docstring.parse("google") if kind.docstring is not None else []
    items = [
        f"- `{each.name}`: {each.description}"
        for section in sections
        if section.kind.value == "attributes"
        for each in section.value
    ]
    return "\n".join(["\n", *items]) if items else ""
