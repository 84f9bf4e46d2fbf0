"""The public names: what tailcut/__init__.py lists, and every class that those objects give or take."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

import tailcut

MADE_BY_USERS = ("Group", "FileStore")
"""Classes with an ``__init__`` of their own that users call. Dataclasses are walked by their fields."""


def public(name: str) -> bool:
    return not name.startswith("_")


def annotated(name: str) -> Iterator[tuple[str, Any]]:
    """The public object, and what of it has annotations: methods, and what properties return."""
    value = getattr(tailcut, name)
    yield name, value
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        for member, code in vars(base).items():
            if not public(member) and not (member == "__init__" and name in MADE_BY_USERS):
                continue
            if isinstance(code, property):
                yield f"{name}.{member}", code.fget
            elif inspect.isfunction(code):
                yield f"{name}.{member}", code


def classes_in(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and typing.get_origin(hint) is None:
        yield hint
    for argument in typing.get_args(hint):
        yield from classes_in(argument)


NAMES = [name for name in tailcut.__all__ if not isinstance(getattr(tailcut, name), ModuleType)]


@pytest.mark.parametrize("name", NAMES)
def test_every_class_that_a_public_object_mentions_is_public(name: str) -> None:
    mentioned = {
        f"{where}({field}): {kind.__name__}"
        for where, value in annotated(name)
        for field, hint in typing.get_type_hints(value).items()
        for kind in classes_in(hint)
        if kind.__module__.partition(".")[0] == "tailcut"
        and kind.__module__ != "tailcut._native"  # private, and says so
        and public(field)
        and getattr(tailcut, kind.__name__, None) is not kind
    }
    assert not mentioned


def test_the_walk_sees_fields_methods_properties_and_inherited_ones() -> None:
    seen = {
        (where, kind.__name__)
        for name in ("Group", "Report", "Scenario", "Attachment", "simulate")
        for where, value in annotated(name)
        for hint in typing.get_type_hints(value).values()
        for kind in classes_in(hint)
    }
    assert {
        ("Group.__init__", "Store"),
        ("Group.allreduce", "Work"),
        ("Attachment.config", "Config"),
        ("Report", "Verdict"),
        ("Scenario", "RateChange"),
        ("simulate", "Simulation"),
    } <= seen


def test_every_listed_name_is_there_once_and_no_other() -> None:
    assert sorted(set(tailcut.__all__)) == tailcut.__all__
    loaded = {name for names in tailcut._HOMES.values() for name in names}
    assert loaded | {"codec"} == set(tailcut.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Grid'"):
        _ = tailcut.Grid


def test_the_version_is_that_of_the_package() -> None:
    assert tailcut.__version__ == metadata.version("tailcut")
