"""Reading a configuration: YAML file and ``-o section.key=value`` overrides to one checked, frozen ``Config``.

Promise: nothing is guessed. An unknown key names the nearest known one, a wrong value names its place, what it is and
what was expected, and a combination that cannot work is refused here, before anything is started or written
(``config_checks``). The resolved configuration can be written out and read back to the same tree.

Paths in a file are relative to that file's folder, paths in an override to the current folder.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import logging
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from ..journal.errors import EXIT_USAGE, UnlostError
from .config_checks import first_problem, oddities
from .config_keys import FIXED, Config, Section, get_key

__all__ = [
    "Config",
    "ConfigError",
    "Difference",
    "KeyInfo",
    "build_config",
    "dump_config",
    "get_key",
    "iter_keys",
    "load_config",
    "recorded_settings",
    "semantic_differences",
    "semantic_fingerprint",
    "semantic_settings",
]


logger = logging.getLogger(__name__)
_S = TypeVar("_S", bound=Section)


class ConfigError(UnlostError):
    """The configuration cannot be used; the message is one line naming source, key and remedy."""

    exit_code = EXIT_USAGE


class KeyInfo(msgspec.Struct, frozen=True):
    """One key of the tree, for documentation and checks. ``default`` is ``msgspec.NODEFAULT`` when it must be given."""

    path: str
    type: Any
    default: Any
    doc: str
    unit: str
    resume: str
    is_path: bool

    @property
    def required(self) -> bool:
        """No default: the file has to give it."""
        return self.default is msgspec.NODEFAULT

    @property
    def expected(self) -> str:
        """The type in words, for messages and documentation."""
        return _type_text(self.type)


class Difference(msgspec.Struct, frozen=True):
    """A fixed key whose value is not that of the recorded run."""

    key: str
    recorded: Any
    configured: Any

    def __str__(self) -> str:
        return f"{self.key}: the run has {_show(self.recorded)}, the configuration {_show(self.configured)}"


# --- the tree as data ----------------------------------------------------------------------------------------------


def iter_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[KeyInfo]:
    """Every key below ``section``, depth first, in the order of declaration."""
    for field in msgspec.structs.fields(section):
        path = prefix + field.encode_name
        if _is_section(field.type):
            yield from iter_keys(field.type, path + ".")
            continue
        doc: str = ""
        extra: dict[str, Any] = {}
        for meta in _metas(field.type):
            doc = meta.description or doc
            extra = meta.extra or extra
        yield KeyInfo(path, field.type, field.default, doc, extra["unit"], extra["resume"], extra["path"])


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _metas(annotation: Any) -> list[msgspec.Meta]:
    return [meta for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]


_TYPE_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}


def _type_text(annotation: Any) -> str:
    """``Annotated[int, Meta(ge=1)] | None`` -> ``whole number ≥ 1, or null``."""
    metas = _metas(annotation)
    bare = typing.get_args(annotation)[0] if metas else annotation
    if typing.get_origin(bare) is typing.Literal:
        return "one of " + ", ".join(str(value) for value in typing.get_args(bare))
    members = typing.get_args(bare)
    if members:
        return ", or ".join(_type_text(member) for member in members)
    words = _TYPE_WORDS[bare]
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"))
    bounds = [
        f"{sign} {getattr(meta, name)}" for name, sign in signs for meta in metas if getattr(meta, name) is not None
    ]
    if any(meta.min_length for meta in metas):
        words += " (not empty)"
    return words + (" " + " and ".join(bounds) if bounds else "")


def _show(value: Any) -> str:
    """A value as it would stand in the file, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").strip()


# --- YAML ----------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML where ``1e-4`` is a number and a key given twice is an error; in plain PyYAML it is a text, and a loss."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?([0-9][0-9_]*)(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            raise yaml.MarkedYAMLError(
                problem=f"key {key_node.value!r} is given twice", problem_mark=key_node.start_mark
            )
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a subclass of the safe loader
    except yaml.MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source}{place}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


# --- reading -------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read ``path``, apply ``section.key=value`` overrides, resolve paths, fill in defaults, check.

    Raises ConfigError.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; name the YAML file in it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    tree = _parse_yaml(text, str(path))
    folder = file.resolve().parent
    name = folder.name if file.stem == "config" else file.stem
    return build_config(tree if tree is not None else {}, overrides, source=str(path), folder=folder, name=name)


def build_config(
    tree: Any,
    overrides: Sequence[str] = (),
    *,
    source: str = "configuration",
    folder: str | Path = ".",
    name: str = "run",
) -> Config:
    """The same from parsed YAML. ``folder``: what relative paths in ``tree`` start from; ``name``: default run name."""
    values: dict[str, tuple[Any, str]] = {}
    _flatten(tree, "", source, values)
    for override in overrides:
        _apply_override(override, values)
    base = Path(folder).resolve()
    for info in _known().values():
        if info.is_path and info.path in values:
            value, origin = values[info.path]
            if value and isinstance(value, str):
                # An override is typed at a prompt: there, a relative path means the current folder.
                start = base if origin == source else Path.cwd()
                values[info.path] = (str((start / Path(value).expanduser()).resolve()), origin)
    checked = _convert(values, source)
    run_name = checked.get("run.name") or name
    run_dir = checked.get("run.dir") or str(base / "runs" / run_name)
    checked |= {"run.name": run_name, "run.dir": run_dir}
    checked["checkpointing.checkpoint_dir"] = checked.get("checkpointing.checkpoint_dir") or f"{run_dir}/checkpoints"
    checked["reward.path"] = checked.get("reward.path") or str(base)
    config = _assemble(Config, checked, "")
    problem = first_problem(config)
    if problem is not None:
        raise ConfigError(f"{source}: {problem}")
    for oddity in oddities(config, frozenset(values)):
        logger.warning("%s: %s", source, oddity)
    return config


def _flatten(node: Any, prefix: str, origin: str, out: dict[str, tuple[Any, str]]) -> None:
    """Dotted key -> (value, where it came from), refusing what is not in the tree."""
    sections = _sections()
    if not isinstance(node, Mapping):
        place = f"{prefix[:-1]}: " if prefix else ""
        raise ConfigError(f"{origin}: {place}expected keys and values, got {_show(node)}")
    for name, value in node.items():
        path = f"{prefix}{name}"
        if path in sections:
            if value is not None:  # a section left empty in the file
                _flatten(value, path + ".", origin, out)
        elif path in _known():
            out[path] = (value, origin)
        else:
            raise ConfigError(f"{origin}: unknown key {path!r}; {_nearest(path)}")


def _apply_override(override: str, values: dict[str, tuple[Any, str]]) -> None:
    origin = f"-o {override}"
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"{origin}: expected section.key=value")
    if path in _sections():
        raise ConfigError(f"{origin}: {path!r} is a section; set one of its keys, e.g. {_first_key(path)}=…")
    if path not in _known():
        raise ConfigError(f"{origin}: unknown key {path!r}; {_nearest(path)}")
    values[path] = (_parse_yaml(text, origin), origin)


@functools.cache
def _known() -> dict[str, KeyInfo]:
    return {info.path: info for info in iter_keys()}


@functools.cache
def _sections() -> set[str]:
    return {path.rpartition(".")[0] for path in _known()}


def _first_key(section: str) -> str:
    return next(path for path in _known() if path.startswith(section + "."))


def _nearest(path: str) -> str:
    """The known key (or section, for a key without dots) that ``path`` most likely meant."""
    leaf = path.rpartition(".")[2]
    candidates = [known for known in _known() if known.rpartition(".")[2] == leaf]
    if not candidates:
        candidates = list(_known()) if "." in path else [*_sections(), *_known()]
    best = max(candidates, key=lambda known: difflib.SequenceMatcher(None, path, known).ratio())
    return f"did you mean {best!r}?"


def _convert(values: Mapping[str, tuple[Any, str]], source: str) -> dict[str, Any]:
    """Check each value by itself, so that a message can name value, place and what was expected."""
    checked: dict[str, Any] = {}
    for info in _known().values():
        if info.path not in values:
            if info.required:
                raise ConfigError(f"{source}: {info.path} is missing: {info.doc}")
            continue
        value, origin = values[info.path]
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{origin}: {info.path}: expected a finite number, got {_show(value)}")
        try:
            checked[info.path] = msgspec.convert(value, info.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{origin}: {info.path}: expected {info.expected}, got {_show(value)}") from error
    return checked


def _assemble(section: type[_S], checked: Mapping[str, Any], prefix: str) -> _S:
    arguments: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        path = prefix + field.encode_name
        if _is_section(field.type):
            arguments[field.name] = _assemble(field.type, checked, path + ".")
        elif path in checked:
            arguments[field.name] = checked[path]
    return section(**arguments)


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML, every key spelled out; ``load_config`` reads it back to an equal tree."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True, width=120)


# --- what may change on resume -------------------------------------------------------------------------------------


def semantic_settings(config: Config) -> dict[str, Any]:
    """The value of every fixed key, recorded in the journal when a run starts."""
    return {info.path: get_key(config, info.path) for info in _known().values() if info.resume == FIXED}


def recorded_settings(config: Config) -> dict[str, Any]:
    """What RunStarted carries: the fixed keys, and what a post-mortem needs for its bounds."""
    return semantic_settings(config) | {name: get_key(config, name) for name in _ASKED_LATER}


_ASKED_LATER = ("journal.progress_interval_tokens",)


def semantic_fingerprint(config: Config) -> str:
    """SHA-256 (hex) over the fixed keys: equal if and only if no fixed key differs."""
    return hashlib.sha256(msgspec.json.encode(semantic_settings(config), order="sorted")).hexdigest()


def semantic_differences(recorded: Mapping[str, Any], config: Config) -> list[Difference]:
    """Every fixed key whose recorded value is not the configured one, in the tree's order.

    ``recorded``: what ``semantic_settings`` gave when the run started. A key that the recording version did not know
    yet counts with its default.
    """
    differences = []
    for info in _known().values():
        if info.resume == FIXED:
            before, now = recorded.get(info.path, info.default), get_key(config, info.path)
            if before != now:
                differences.append(Difference(info.path, before, now))
    return differences
