"""The Ray actors of engines, some of which may be dead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError


def ask_each(actors: Iterable[ActorHandle], method: str, *args: Any) -> list[Any]:
    """What each actor answers to ``method``; None: it is dead, or died meanwhile."""
    return gather([getattr(actor, method).remote(*args) for actor in actors])


def gather(calls: Iterable[ray.ObjectRef]) -> list[Any]:
    """What calls of actors answer; None: the actor is dead, or died meanwhile."""
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(ray.get(call))
        except RayActorError:
            answers.append(None)
    return answers


def name_server(replica: int, node: int, suffix: str = "") -> str:
    """Name that verl gives the actor of a replica on one of its nodes."""
    return f"sglang_server_{replica}_{node}{suffix}"


def find_actor(name: str) -> ActorHandle | None:
    """The actor of this name that lives, as far as Ray knows."""
    try:
        return ray.get_actor(name)
    except ValueError:
        return None
