"""The OpenAPI 3.1 document of a server, from its table of endpoints."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from diptych.httpserver.access import Access
from diptych.httpserver.endpoints import Answer, Endpoint

VERSION = "3.1.0"

_SCHEMES: dict[str, dict[str, str]] = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "`--api-key`. A server that was started without it asks for none.",
    },
    "adminKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "`--admin-api-key`; without it, `--api-key` opens these routes too.",
    },
}

_SECURITY: Mapping[Access, list[dict[str, list[str]]]] = {
    Access.OPEN: [],
    Access.READING: [{"key": []}, {"adminKey": []}, {}],
    Access.GENERATING: [{"key": []}, {"adminKey": []}, {}],
    Access.ADMIN: [{"adminKey": []}, {"key": []}, {}],
}
"""Alternatives; the empty one is for servers without keys."""


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    """The field that is at fault."""
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """Whatever went wrong, in OpenAI's shape."""

    error: ErrorDetail


def document_handler(title: str, endpoints: Iterable[Endpoint]) -> Handler:
    """Shows the document; it is made when somebody asks first."""
    endpoints = list(endpoints)

    @functools.cache
    def document() -> bytes:
        return msgspec.json.encode(describe(title, endpoints))

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=document(), content_type="application/json")

    return show


def describe(title: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document as data. Equal endpoints make equal documents."""
    endpoints = list(endpoints)
    types: list[object] = [Error]
    types += [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    types += [a.data for e in endpoints for a in e.answers if a.data is not None]
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_schema_of_other, ref_template="#/components/schemas/{name}"
    )
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation: dict[str, Any] = {
            "operationId": operation_id(endpoint),
            "summary": endpoint.summary,
            "tags": [endpoint.access.value],
            "security": _SECURITY[endpoint.access],
            "responses": _responses(endpoint, schema_of),
        }
        if parameters := _parameters(endpoint):
            operation["parameters"] = parameters
        if endpoint.body is not None:
            content = {"application/json": {"schema": schema_of[id(endpoint.body)]}}
            operation["requestBody"] = {"required": endpoint.body_required, "content": content}
        paths.setdefault(endpoint.template, {})[endpoint.method.lower()] = operation
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version("diptych")},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
    }


def _schema_of_other(kind: type) -> dict[str, Any]:
    """Of a type that msgspec has no schema for."""
    if kind is object:
        return {"description": "Any JSON."}
    raise NotImplementedError


def operation_id(endpoint: Endpoint) -> str:
    """`POST /v1/models/{name}` is `post_v1_models_name`."""
    return re.sub(r"\W+", "_", f"{endpoint.method.lower()}{endpoint.template}").strip("_")


def _responses(endpoint: Endpoint, schema_of: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    success: dict[str, Any] = {}
    for status in endpoint.statuses:
        content = {
            answer.media_type: {"schema": _schema(answer, schema_of)}
            for answer in endpoint.answers
            if answer.media_type is not None
        }
        success[str(status)] = {"description": HTTPStatus(status).phrase} | (
            {"content": content} if content else {}
        )
    error = {"application/json": {"schema": schema_of[id(Error)]}}
    return success | {"default": {"description": "What went wrong", "content": error}}


def _schema(answer: Answer, schema_of: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    if answer.data is not None:
        return schema_of[id(answer.data)]
    return {} if answer.media_type == "application/json" else {"type": "string"}


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    text = {"type": "string"}
    return [
        {"name": name, "in": "path", "required": True, "schema": text | {"minLength": 1}}
        for name in endpoint.parts
    ] + [
        {"name": query.name, "in": "query", "description": query.meaning, "schema": text}
        for query in endpoint.queries
    ]
