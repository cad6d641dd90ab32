"""The page of the gRPC service, out of `protos/inference.proto` and its comments."""

from __future__ import annotations

import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

from docs.site.tables import cell, table
from protos.generate import PACKAGE

PROTO: Final = "protos/inference.proto"
HEAD: Final = """# gRPC

<!-- Written by `python -m docs.site.write`, out of protos/inference.proto; not to be changed by hand. -->

"""
# Numbers of fields in the descriptors of files, messages and services: comments are found by paths of them.
MESSAGES, ENUMS, SERVICES, FIELDS, METHODS, SYNTAX = 4, 5, 6, 2, 2, 12
Comments = dict[tuple[int, ...], str]


def grpc_page() -> str:
    """Markdown with the service, its messages and what their comments say."""
    file = _described()
    comments: Comments = {
        tuple(place.path): " ".join(place.leading_comments.split()) for place in file.source_code_info.location
    }
    (first,) = (place for place in file.source_code_info.location if tuple(place.path) == (SYNTAX,))
    introduction = "\n".join([*first.leading_detached_comments, first.leading_comments]).strip()
    introduction = "\n".join(line.strip() for line in introduction.splitlines())
    sections = [HEAD + introduction + f"\n\nThe contract: [`{PROTO}`](../{PROTO}), package `{file.package}`.\n"]
    for at, service in enumerate(file.service):
        rows = []
        for number, method in enumerate(service.method):
            answer = method.output_type.rpartition(".")[2]
            streamed = "a stream of " if method.server_streaming else ""
            told = comments.get((SERVICES, at, METHODS, number), "")
            asked = method.input_type.rpartition(".")[2]
            rows.append([f"`{method.name}`", _link(asked), streamed + _link(answer), cell(told)])
        sections.append(f"## Service {service.name}\n\n{table(['method', 'takes', 'gives', 'what it does'], rows)}")
    for at, message in enumerate(file.message_type):
        if not message.options.map_entry:
            sections.append(_message(message, (MESSAGES, at), comments))
    sections += [_enum(enum, (ENUMS, at), comments) for at, enum in enumerate(file.enum_type)]
    return "\n".join(sections)


def _described() -> FileDescriptorProto:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "described"
        include = [f"--proto_path={PACKAGE.parent}", f"--proto_path={resources.files('grpc_tools') / '_proto'}"]
        arguments = ["protoc", *include, "--include_source_info", f"--descriptor_set_out={written}", PROTO]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc refuses {PROTO}")
        (file,) = FileDescriptorSet.FromString(written.read_bytes()).file
    return file


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> str:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = []
    for at, field in enumerate(message.field):
        told = comments.get((*path, FIELDS, at), "")
        if field.HasField("oneof_index") and not field.proto3_optional:
            told = f"(one of `{message.oneof_decl[field.oneof_index].name}`) {told}"
        rows.append([f"`{field.name}`", f"{field.number}", _kind(field, maps), cell(told)])
    body = table(["field", "number", "type", "what it is"], rows) if rows else "No fields.\n"
    return "\n".join([f"## {message.name}\n", *_told(comments.get(path, "")), body])


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> str:
    rows = [[f"`{value.name}`", f"{value.number}"] for value in enum.value]
    return "\n".join([f"## {enum.name}\n", *_told(comments.get(path, "")), table(["value", "number"], rows)])


def _told(comment: str) -> list[str]:
    return [f"{cell(comment)}\n"] if comment else []


def _kind(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    """As the file writes it; types of the file as links to their sections."""
    last = field.type_name.rpartition(".")[2]
    if last in maps:
        key, value = (_kind(part, {}) for part in maps[last].field)
        return f"map of {key} to {value}"
    kind = _link(last) if last else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"
