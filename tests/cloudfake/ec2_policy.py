"""How AWS decides whether a policy document allows a call: the part of its rules that we use."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

Document = Mapping[str, Any]


def many(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


@cache
def _pattern(text: str) -> re.Pattern[str]:
    escaped = re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(escaped, re.IGNORECASE | re.DOTALL)


def like(text: str, pattern: str) -> bool:
    return _pattern(pattern).fullmatch(text) is not None


def _holds(operator: str, key: str, wanted: Any, context: Mapping[str, Any]) -> bool:
    """Return whether one condition holds; a key that the call lacks fails all but IfExists and Null."""
    each = operator.removeprefix("ForAllValues:")
    if_exists = each.endswith("IfExists")
    each = each.removesuffix("IfExists")
    told = next((value for name, value in context.items() if name.lower() == key.lower()), None)
    if each == "Null":
        return (told is None) == (str(many(wanted)[0]).lower() == "true")
    if told is None:
        return if_exists or operator.startswith("ForAllValues:")
    values = [str(value) for value in many(told)]
    wanted = [str(value) for value in many(wanted)]
    match each:
        case "StringEquals" | "Bool":
            return all(value in wanted for value in values)
        case "StringNotEquals":
            return all(value not in wanted for value in values)
        case "StringLike" | "ArnLike" | "ArnEquals":
            return all(any(like(value, pattern) for pattern in wanted) for value in values)
        case "NumericLessThanEquals":
            return all(float(value) <= float(wanted[0]) for value in values)
    raise ValueError(f"the evaluator lacks the operator {operator}")


def _matches(statement: Document, action: str, resource: str, context: Mapping[str, Any]) -> bool:
    if not any(like(action, pattern) for pattern in many(statement["Action"])):
        return False
    if not any(like(resource, pattern) for pattern in many(statement.get("Resource", "*"))):
        return False
    return all(
        _holds(operator, key, wanted, context)
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def allows(
    documents: Sequence[Document], action: str, resource: str, context: Mapping[str, Any]
) -> bool:
    """Return whether some statement allows the action on this resource and none denies it."""
    effects = {
        statement["Effect"]
        for document in documents
        for statement in many(document["Statement"])
        if _matches(statement, action, resource, context)
    }
    return "Allow" in effects and "Deny" not in effects


def actions(document: Document) -> set[str]:
    """Return every action that the document names."""
    return {str(x) for statement in many(document["Statement"]) for x in many(statement["Action"])}
