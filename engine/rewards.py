"""Reward functions: ``module:function``, called as ``reward(prompt, response, answer, row) -> float``.

Promise: what can be found wrong before the run starts (no such module, no such function, a signature that doesn't take
the four arguments) is a RewardError that says so; what goes wrong in a call (an exception, a result that is no finite
number) fails that attempt with its cause, as a fault of the data.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..journal.errors import EXIT_USAGE, UnlostError
from ..replay.events import FAIL_DATA
from .protocols import AttemptError


class RewardError(UnlostError):
    """The reward function can't be used; the message names it and the remedy."""

    exit_code = EXIT_USAGE


class Reward:
    """A checked reward function. ``name`` is what the configuration calls it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._function = function

    def __call__(self, prompt: str, response: str, answer: Any, row: dict[str, Any]) -> float:
        """The reward of one response, finite. ``answer`` is the row's, None if it has none.

        Raises AttemptError (data) with the cause.
        """
        try:
            result = self._function(prompt, response, answer, row)
        except Exception as error:
            raise AttemptError(FAIL_DATA, f"reward {self.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, numbers.Real):
            raise AttemptError(
                FAIL_DATA, f"reward {self.name} returned {_shown(result)} ({type(result).__name__}), not a number"
            )
        reward = float(result)
        if not math.isfinite(reward):
            raise AttemptError(FAIL_DATA, f"reward {self.name} returned {reward}, not a finite number")
        return reward


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_reward(name: str, folder: str | Path | None = None) -> Reward:
    """The reward function called ``module:function``.

    A module of that name in ``folder`` (the configuration's) is taken first, then what ``sys.path`` has; modules that
    it imports from beside itself are found too. Raises RewardError.
    """
    module_name, separator, function_name = name.partition(":")
    if not separator or not module_name or not function_name.isidentifier():
        raise RewardError(f"reward.function {name!r} must be module:function, such as my_rewards:score")
    module = _load_module(module_name, Path(folder) if folder is not None else None)
    function = getattr(module, function_name, None)
    if function is None:
        near = difflib.get_close_matches(function_name, [key for key in vars(module) if not key.startswith("_")], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(f"reward.function {name!r}: {_file(module)} has no {function_name!r}{hint}")
    if not callable(function):
        raise RewardError(f"reward.function {name!r}: {function_name!r} in {_file(module)} is not callable")
    _check_signature(name, function)
    return Reward(name, function)


def _file(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"reward.function {name!r} is async; it is called from a thread and must be a plain function")
    try:
        inspect.signature(function).bind("", "", None, {})
    except TypeError as error:
        raise RewardError(
            f"reward.function {name!r}: {function.__name__ if hasattr(function, '__name__') else function}"
            f"{inspect.signature(function)} can't be called with (prompt, response, answer, row): {error}"
        ) from error
    except ValueError:
        return  # a built-in that doesn't tell its signature: the first call will show


def _load_module(name: str, folder: Path | None) -> ModuleType:
    if folder is not None:
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        if str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))  # last, so that nothing installed is shadowed
        if file.is_file():
            return _load_file(name, file.resolve())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            places = f"{folder} and " if folder is not None else ""
            raise RewardError(
                f"reward.function: no module {name!r} in {places}sys.path; put {name}.py beside the configuration, or "
                "set reward.path"
            ) from error
        raise RewardError(f"reward.function: importing {name!r} failed: {error}") from error
    except Exception as error:
        raise RewardError(f"reward.function: importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(name: str, file: Path) -> ModuleType:
    # A name of its own, so that two configurations may each have their reward.py, and none shadows a real package.
    unique = f"_unlost_reward_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}_{name.replace('.', '_')}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.function: {file} can't be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[unique]
        if isinstance(error, Exception):
            raise RewardError(f"reward.function: running {file} failed: {type(error).__name__}: {error}") from error
        raise
    return module
