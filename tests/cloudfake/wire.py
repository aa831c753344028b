"""What AWS's services say on the wire, taken from botocore's own models of them.

Reads a request into the parameters that a caller gave to boto3, and writes an answer that botocore's
parser takes for AWS's. Nothing here knows what the calls mean.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

from botocore.loaders import Loader
from botocore.model import ListShape, OperationModel, ServiceModel, Shape, StructureShape

JSON_TYPE = "application/x-amz-json-1.1"


class Malformed(Exception):  # noqa: N818 - it names what happened
    """The request has a parameter that the service's model lacks."""


@cache
def service(name: str) -> ServiceModel:
    return ServiceModel(Loader().load_service_model(name, "service-2"), name)


def is_query(name: str) -> bool:
    """Return whether the service is asked by form fields and answers in XML."""
    return service(name).protocol in ("ec2", "query")


def read_query(name: str, body: str) -> tuple[OperationModel, dict[str, Any]]:
    """Return the operation of a form, and its parameters as they were given to boto3."""
    fields = dict(parse_qsl(body, keep_blank_values=True))
    operation = service(name).operation_model(fields.pop("Action"))
    fields.pop("Version", None)
    tree = _tree(fields)
    shape = operation.input_shape
    return operation, {} if shape is None else _from_form(shape, tree, name == "ec2")


def read_json(name: str, target: str, body: str) -> tuple[OperationModel, dict[str, Any]]:
    return service(name).operation_model(target.rpartition(".")[2]), json.loads(body or "{}")


def is_rest(name: str) -> bool:
    """Return whether the service is asked by paths and methods."""
    return service(name).protocol == "rest-json"


def read_rest(name: str, method: str, url: str, body: str) -> tuple[OperationModel, dict[str, Any]]:
    """Return the operation that a method and a path stand for, and its parameters."""
    path = urlsplit(url).path
    for operation_name in service(name).operation_names:
        operation = service(name).operation_model(operation_name)
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", operation.http["requestUri"])
        found = re.fullmatch(pattern, path)
        if found is not None and operation.http["method"] == method:
            return operation, json.loads(body or "{}") | found.groupdict()
    raise Malformed(f"There is no {method} {path}")


def write_query(name: str, operation: OperationModel, answer: Mapping[str, Any], of: str) -> str:
    """Return the XML of an answer; `of` is the request's id."""
    inside = "".join(_to_xml(operation.output_shape, answer)) if operation.output_shape else ""
    if name == "ec2":
        inside += f"<requestId>{of}</requestId>"
    else:
        wrapper = f"{operation.name}Result"
        inside = f"<{wrapper}>{inside}</{wrapper}>"
        inside += f"<ResponseMetadata><RequestId>{of}</RequestId></ResponseMetadata>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{operation.name}Response>{inside}</{operation.name}Response>'


def write_json(answer: Mapping[str, Any]) -> str:
    return json.dumps(answer, default=_seconds)


def refusal_body(name: str, code: str, said: str, of: str) -> str:
    """Return the body of an error as this service words it."""
    if not is_query(name):
        return json.dumps({"__type": code, "message": said})
    error = f"<Error><Code>{escape(code)}</Code><Message>{escape(said)}</Message></Error>"
    if name == "ec2":
        return f'<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors>{error}</Errors><RequestID>{of}</RequestID></Response>'
    return f"<ErrorResponse>{error}<RequestId>{of}</RequestId></ErrorResponse>"


def _seconds(value: Any) -> float:
    if isinstance(value, datetime):
        return value.timestamp()
    raise TypeError(f"no JSON for {value!r}")


def _tree(fields: Mapping[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        *ahead, last = name.split(".")
        place = tree
        for part in ahead:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def _form_name(member: Shape, name: str, ec2: bool) -> str:
    if ec2 and (query := member.serialization.get("queryName")):
        return str(query)
    told = str(member.serialization.get("name", name))
    return told[0].upper() + told[1:] if ec2 else told


def _from_form(shape: Shape, tree: Any, ec2: bool) -> Any:
    if isinstance(shape, StructureShape):
        by_name = {_form_name(m, name, ec2): (name, m) for name, m in shape.members.items()}
        if unknown := set(tree) - set(by_name):
            raise Malformed(f"The parameter {min(unknown)} is not recognized")
        return {
            by_name[field][0]: _from_form(by_name[field][1], value, ec2)
            for field, value in tree.items()
        }
    if isinstance(shape, ListShape):
        tree = tree if ec2 else tree.get("member", tree)
        return [_from_form(shape.member, tree[key], ec2) for key in sorted(tree, key=int)]
    return READS.get(shape.type_name, str)(tree)


READS: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: text == "true",
    "integer": int,
    "long": int,
    "float": float,
    "double": float,
    "timestamp": datetime.fromisoformat,
}


def _to_xml(shape: Shape, value: Any) -> Iterator[str]:
    """Yield the inside of an element."""
    if isinstance(shape, StructureShape):
        if unknown := set(value) - set(shape.members):
            raise Malformed(f"{shape.name} has no {sorted(unknown)}")
        for name, part in value.items():
            if part is None:
                continue
            member = shape.members[name]
            tag = member.serialization.get("name", name)
            if isinstance(member, ListShape) and member.serialization.get("flattened"):
                for entry in part:
                    yield f"<{tag}>{''.join(_to_xml(member.member, entry))}</{tag}>"
            else:
                yield f"<{tag}>{''.join(_to_xml(member, part))}</{tag}>"
    elif isinstance(shape, ListShape):
        tag = shape.member.serialization.get("name", "member")
        for entry in value:
            yield f"<{tag}>{''.join(_to_xml(shape.member, entry))}</{tag}>"
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, datetime):
        yield value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    else:
        yield escape(str(value))


TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "long": int,
    "float": (int, float),
    "double": (int, float),
    "timestamp": datetime,
}


def flaws(shape: Shape | None, value: Any, at: str) -> Iterator[str]:
    """Yield what the model has against a request or an answer; boto3 looks at a part of that only."""
    if shape is None or value is None:
        return
    if isinstance(shape, StructureShape):
        told = {name for name, part in value.items() if part is not None}
        yield from (f"{at} has no {name}" for name in sorted(told - set(shape.members)))
        yield from (f"{at} lacks {name}" for name in sorted({*shape.required_members} - told))
        for name in sorted(told & set(shape.members)):
            yield from flaws(shape.members[name], value[name], f"{at}.{name}")
        return
    size: Any = len(value) if hasattr(value, "__len__") else value
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and size < least) or (most is not None and size > most):
        yield f"{at} is {value!r}, and takes {least} to {most}"
    if isinstance(shape, ListShape):
        for entry in value:
            yield from flaws(shape.member, entry, f"{at}[]")
    elif not isinstance(value, TYPES.get(shape.type_name, object)):
        yield f"{at} is {value!r}, and no {shape.type_name}"
    elif (words := shape.metadata.get("enum")) and value.lower() not in map(str.lower, words):
        yield f"{at} is {value!r}, which is none of its words"
