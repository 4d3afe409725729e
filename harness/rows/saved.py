"""What is measured is kept as json, of dataclasses, with a schema number. A file of another schema or shape is refused.

A field is written as it is called, and read into the type that it has: `dict[int, float]` gets its int keys back.
"""

import dataclasses
import json
import types
import typing

SCHEMA = 1  # of all files of results: raise it when a field changes its name or its meaning


class UnreadableResult(ValueError):
    """One line, for a user: what is wrong with a file of results."""


def to_json(result):
    """A dataclass -> text, with the schema first. Rows that hold much are still read by people: indented."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(result)}, indent=1) + "\n"


def from_json(kind, text):
    """-> an object of dataclass `kind`. Raises UnreadableResult: no json, another schema, other fields, other types."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UnreadableResult(f"it is no json ({error})") from None
    if not isinstance(found, dict) or "schema" not in found:
        raise UnreadableResult("it has no schema: it is no result, or an older one")
    if (schema := found.pop("schema")) != SCHEMA:
        raise UnreadableResult(f"its schema is {schema}, this program's is {SCHEMA}")
    return _typed(kind, found, kind.__name__)


def _typed(kind, value, where):
    """`value`, as json has it, as what the annotation `kind` says."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):  # something or None
        return None if value is None else _typed(inner[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where)
    expected = origin or kind
    if not isinstance(value, {float: (int, float), tuple: list}.get(expected, expected)):
        raise UnreadableResult(f"{where} is {type(value).__name__}, and should be {expected.__name__}")
    if origin is list:
        return [_typed(inner[0], one, where) for one in value]
    if origin is tuple:
        return tuple(_typed(one_kind, one, where) for one_kind, one in zip(inner, value, strict=True))
    if origin is dict:
        return {inner[0](key): _typed(inner[1], one, f"{where}[{key}]") for key, one in value.items()}
    return value


def _object(kind, value, where):
    if not isinstance(value, dict):
        raise UnreadableResult(f"{where} is {type(value).__name__}, and should be an object")
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    required = {name for name, field in fields.items()
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING}
    if value.keys() - fields or required - value.keys():
        unknown, missing = sorted(value.keys() - fields), sorted(required - value.keys())
        raise UnreadableResult(f"{where} " + " and ".join(
            [f"has {', '.join(unknown)}"] * bool(unknown) + [f"lacks {', '.join(missing)}"] * bool(missing)))
    return kind(**{name: _typed(hints[name], one, f"{where}.{name}") for name, one in value.items()})
