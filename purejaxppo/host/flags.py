"""What a command is told by its flags, and what is said against them."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import tyro
from tyro import _errors as parse_errors

from purejaxppo.config import Config, HParams
from purejaxppo.host.training import Options


def parse(function: Callable[..., Any], argv: list[str], command: str, **options: Any) -> Any:
    """What tyro makes of the flags; what it has to say against them becomes one line."""

    def refuse(event: parse_errors.ParseErrorEvent) -> None:
        if isinstance(event, parse_errors.UnrecognizedArgs):
            token = event.tokens[0]
            close = difflib.get_close_matches(token.replace("_", "-"), _flags(function), n=1)
            raise ValueError(f"{token}: there is no such argument" + (f"; did you mean {close[0]}?" if close else ""))
        if isinstance(event, parse_errors.InstantiationFailure):
            flag = event.argument.lowered.name_or_flags[0] + ": " if event.argument else ""
            raise ValueError(f"{flag}{event.message}")
        title, contents = parse_errors._render(event)
        raise ValueError(next((text for text in contents if isinstance(text, str)), title))

    with parse_errors.on_parse_error(refuse):
        return tyro.cli(function, args=argv, prog=f"purejaxppo {command}", **options)


def _flags(function: Callable[..., Any]) -> list[str]:
    """The flags of a command, for the nearest one to a typo."""
    nested = {
        "config": [f"config.{field.name}" for field in dataclasses.fields(Config)],
        "hparams": [f"hparams.{name}" for name in HParams._fields],
        "options": [field.name for field in dataclasses.fields(Options)],
    }
    names = [flag for name in inspect.signature(function).parameters for flag in nested.get(name, [name])]
    return [f"--{name.replace('_', '-')}" for name in names]
