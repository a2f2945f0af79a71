"""Words that start a program, from the containers of a docker-compose file or of Kubernetes manifests.

`words_of(text, begins)` returns the words of the first container that starts it, with how many run; None where the text
is no such file. Variables of the container's own environment are put in. Leaves out charts with templates, and values
from secrets and config maps.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gnomon.errors import FormatError
from gnomon.formats.yaml_file import read_yaml

IMAGES = {"vllm": ("vllm", "serve"), "llama.cpp": ("llama-server",), "ovms": ("ovms",), "openvino": ("ovms",)}
"""Part of an image's name -> the words of its entrypoint, which a container that gives only options leaves out."""


@dataclass(frozen=True, slots=True)
class Container:
    """What a container runs."""

    words: list[str]
    replicas: int
    """Copies of it."""


def words_of(text: str, begins: Sequence[str]) -> Container | None:
    """The container that starts the program. FormatError for a file of containers none of which does."""
    if not re.search(r"^\s*(services|apiVersion|kind)\s*:", text, re.MULTILINE):
        return None
    found = [
        one
        for index, part in enumerate(re.split(r"^---\s*$", text, flags=re.MULTILINE))
        if part.strip()
        for one in _containers(read_yaml(part, f"document {index + 1}"), 1)
    ]
    for one in found:
        for at in range(len(one.words)):
            # `/usr/bin/python3 -m …` is as good as `python -m …`.
            names = [word.rpartition("/")[2].replace("python3", "python") for word in one.words[at : at + len(begins)]]
            if names == list(begins):
                return one
    raise FormatError(f"none of its {len(found)} containers starts `{' '.join(begins)}`")


def _containers(value: object, replicas: int) -> Iterator[Container]:
    """All containers under a value, with the replicas of what holds them."""
    if isinstance(value, list):
        for one in value:
            yield from _containers(one, replicas)
    if not isinstance(value, Mapping):
        return
    if "image" in value or "command" in value:
        deploy = value.get("deploy")
        many = deploy.get("replicas", replicas) if isinstance(deploy, Mapping) else replicas
        yield Container(_words(value), many if isinstance(many, int) else 1)
        return
    # Kubernetes has replicas above the template that holds the containers, docker-compose in `deploy` of the container.
    own = value.get("replicas")
    for one in value.values():
        yield from _containers(one, own if isinstance(own, int) and not isinstance(own, bool) else replicas)


def _words(container: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for key in ("entrypoint", "command", "args"):
        words_value = container.get(key)
        if isinstance(words_value, str):
            words += shlex.split(words_value)
        elif isinstance(words_value, list):
            words += [str(word) for word in words_value]
    # `sh -c SCRIPT`: the words are those of the script, whose lines may go on after a backslash.
    if len(words) > 2 and words[0].rpartition("/")[2] in ("sh", "bash") and words[1].startswith("-"):
        words = shlex.split(" ".join(words[2:]).replace("\\\n", " "), comments=True)
    image = str(container.get("image", ""))
    if words and words[0].startswith("-"):
        words = [*image_starts(image), *words]
    env = dict(_env(container))
    # $NAME and ${NAME} of a shell, $(NAME) of Kubernetes; a name that the container does not set stays as it is.
    return [re.sub(r"\$[({]?(\w+)[)}]?", lambda m: env.get(m[1], m[0]), word) for word in words]


def image_starts(image: str) -> tuple[str, ...]:
    """The words of an image's entrypoint; () of one that is not known."""
    if not re.fullmatch(r"[\w.-]+(:\d+)?(/[\w.-]+)+(:[\w.-]+)?(@sha256:\w+)?", image):
        return ()
    return next((start for part, start in IMAGES.items() if part in image), ())


def _env(container: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key in ("env", "environment"):
        env_value = container.get(key)
        if isinstance(env_value, Mapping):
            yield from ((str(name), str(value)) for name, value in env_value.items())
        elif isinstance(env_value, list):
            for one in env_value:
                if isinstance(one, Mapping) and "value" in one:
                    yield str(one.get("name")), str(one["value"])
                elif isinstance(one, str) and "=" in one:
                    name, _, value = one.partition("=")
                    yield name, value
