"""What is compared. All of it is called through fla.ops.kda.chunk_kda; the environment, read at each call, chooses."""

import importlib.util
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OURS_OFF = {"FLA_KDA_CUTE": "0"}
OURS_ON = {"FLA_KDA_CUTE": "1"}


@dataclass(frozen=True)
class Implementation:
    """`environment` makes chunk_kda run it; one that FLA does not know needs a `call` of chunk_kda's arguments."""

    name: str
    environment: dict[str, str]
    package: str | None = None  # must be installed for it
    call: Any = None
    through_fla: bool = True
    only_flashkdas: bool = False  # it runs FlashKDA's own call, and leaves others to somebody else

    def takes(self, case):
        return case.call == "flashkda" or not self.only_flashkdas

    @property
    def ours(self):
        return self.environment.get("FLA_KDA_CUTE") == "1"

    def missing(self):
        """Why it cannot run here, or None."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        if not self.through_fla and self.call is None:
            return f"FLA does not call it: give IMPLEMENTATIONS[{self.name!r}] a call"
        return None

    def __call__(self, inputs):
        """(out, final_state) of chunk_kda(**inputs)."""
        if self.call is not None:
            return self.call(**inputs)
        from fla.ops.kda import chunk_kda

        return chunk_kda(**inputs)

    @contextmanager
    def selected(self):
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("triton", {**OURS_OFF, "FLA_FLASH_KDA": "0"}),
        Implementation(
            "exact",
            {**OURS_ON, "FLA_KDA_CUTE_MODE": "exact", "FLA_KDA_CUTE_STRICT": "1"},
            only_flashkdas=True,
        ),
        # What a user gets.
        Implementation(
            "auto",
            {**OURS_ON, "FLA_KDA_CUTE_MODE": "auto", "FLA_KDA_CUTE_STRICT": "0", "FLA_FLASH_KDA": "0"},
        ),
        Implementation("flashkda", {**OURS_OFF, "FLA_FLASH_KDA": "1"}, package="flash_kda", only_flashkdas=True),
        Implementation("cudnn", OURS_OFF, package="cudnn", through_fla=False),
    )
}
