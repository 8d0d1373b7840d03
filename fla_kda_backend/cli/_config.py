"""A model's config.json, read by somebody who did not write it: each complaint is one line with file, field and remedy."""

import json
import math
import re
from pathlib import Path
from typing import Any

LARGEST = 1 << 16  # of heads and of columns per head: beyond any model, and within what tensors without memory can have
DTYPES = ("bfloat16", "float16", "float32", "float64")
_REQUIRED = object()


class Unfit(ValueError):
    """Why no layer can be read from the file."""


class Config:
    """The fields of a JSON object; `prefix` names an inner one."""

    def __init__(self, path: Path, fields: dict[str, Any], prefix: str = "") -> None:
        self.path, self.fields, self.prefix = path, fields, prefix

    @classmethod
    def read(cls, given: str | Path) -> "Config":
        """Of a file, or of the config.json in a directory; the fields of text_config are taken for the model's own."""
        path = Path(given)
        try:
            if path.is_dir():
                path = path / "config.json"
            fields = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise Unfit(f"{path}: no such file{_hub(str(given))}") from None
        except OSError as error:
            raise Unfit(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise Unfit(f"{path}: is no JSON: {error or 'nested too deep'}") from None
        if not isinstance(fields, dict):
            raise Unfit(f"{path}: holds {_shown(fields)}, not an object: give a model's config.json")
        inner = fields.get("text_config")
        return cls(path, {**fields, **inner} if isinstance(inner, dict) else fields)

    def inner(self, name: str) -> "Config":
        """The object that a field holds; an empty one where it is null or missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.unfit(name, "must be an object with num_heads and head_dim")
        return Config(self.path, value or {}, f"{name}.")

    def given(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return self.fields.get(name) is not None

    def count(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number above 0."""
        value = self.fields.get(name, default)
        if type(value) is not int or not 0 < value <= LARGEST:
            raise self.unfit(name, f"must be a whole number from 1 to {LARGEST}" + _or_left_out(default))
        return value

    def number(self, name: str, default: Any = _REQUIRED, above: float = -math.inf, most: float = math.inf) -> float:
        """A number that is finite in double precision."""
        value = self.fields.get(name, default)
        try:
            fits = type(value) in (int, float) and math.isfinite(value) and above < value <= most
        except OverflowError:
            fits = False
        if not fits:
            bounds = "" if above == -math.inf else f" above {above:g}" + ("" if most == math.inf else f", at most {most}")
            raise self.unfit(name, f"must be a number{bounds}" + _or_left_out(default))
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name, default)
        if type(value) is not bool:
            raise self.unfit(name, "must be true or false" + _or_left_out(default))
        return value

    def dtype(self) -> str:
        """The name of the dtype of activations, bfloat16 where none is given."""
        for name in ("dtype", "torch_dtype"):
            if self.given(name):
                value = self.fields[name]
                short = value.removeprefix("torch.") if isinstance(value, str) else None
                if short not in DTYPES:
                    raise self.unfit(name, f"must be one of {', '.join(DTYPES)}: write the one that the model runs in")
                return short
        return "bfloat16"

    def unfit(self, name: str, text: str) -> Unfit:
        return Unfit(f"{self.path}: {self.prefix}{name} {text}; it is {_shown(self.fields.get(name))}")


def _hub(given: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return ": give a model's config.json, or its directory"
    command = f"hf download {given} config.json --local-dir {given.rpartition('/')[2]}"
    return f". A model of the Hugging Face hub must be downloaded first: {command}"


def _or_left_out(default: Any) -> str:
    return "" if default is _REQUIRED else f", or be left out for FLA's default, {json.dumps(default)}"


def _shown(value: Any) -> str:
    """A value as JSON has it, on one line and not too long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
