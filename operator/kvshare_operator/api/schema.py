"""The vocabulary of the resource's models: strict values, bounded lists, CEL rules beside the fields.

Why this exists: spec and status are written with the same words, and every bound that the API server enforces
stands where the field is. Knows no field of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import pydantic
from pydantic import Field

from kvshare_operator.core.quantity import bytes_of

MAX_SIZE: Final = 1024


def cel(rule: str, message: str) -> dict[str, str]:
    """Return one ``x-kubernetes-validations`` entry; a multi-line rule without message is refused by servers."""
    return {"rule": rule, "message": message}


def rules(*entries: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a model or field with these CEL rules."""
    return {"x-kubernetes-validations": list(entries), **more}


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join({"tp": "TP"}.get(part, part.capitalize()) for part in tail)


class StrictModel(pydantic.BaseModel):
    """Strict (a bool or a string is never a size), frozen, camelCase outside."""

    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, alias_generator=_camel, validate_by_name=True, validate_by_alias=True
    )


Size = Annotated[int, Field(ge=1, le=MAX_SIZE, json_schema_extra={"format": "int32"})]
SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
"""A list whose elements are unique; their order means nothing."""
Sizes = Annotated[list[Size], Field(min_length=1, max_length=16, json_schema_extra=SET)]
Count = Annotated[int, Field(ge=0, json_schema_extra={"format": "int32"})]


def _readable(text: str) -> str:
    """Refuse what is no quantity of memory; objects of looser rules may hold any text. Raises ValueError."""
    bytes_of(text)
    return text


Quantity = Annotated[
    str,
    Field(min_length=1, max_length=24, json_schema_extra={"x-kubernetes-int-or-string": True}),
    pydantic.AfterValidator(_readable),
]


def quantity_rule(minimum: str) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a quantity of at least ``minimum``."""
    rule = f"type(self) == string && isQuantity(self) && quantity(self).compareTo(quantity('{minimum}')) >= 0"
    return rules(cel(rule, f"a quantity of at least {minimum}, with a unit"), **{"x-kubernetes-int-or-string": True})
