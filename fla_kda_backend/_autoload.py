"""What torch calls while it is imported: watch for FLA's KDA, and register the backend once it is there.

An exception here would break `import torch` for everybody, and every process pays for the time spent here. So almost
nothing is imported (`typing` least of all), nothing may raise, FLA is never imported from here, and no import lock is waited
for.

The hook stays in `sys.meta_path`: a module that is imported again or reloaded has a new chunk_kda, which is registered too.
A forked child inherits the hook; a spawned one gets its own when it imports torch.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False  # typing's, which type checkers know by its name
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The module that defines chunk_kda, and the package that users import it from.
MODULE, PACKAGE = WATCHED = ("fla.ops.kda.chunk", "fla.ops.kda")

failure: Exception | None = None  # on the way to registration.py, which keeps its own


def register() -> bool:
    """Register the backend with FLA if FLA's chunk_kda is imported by now, and watch for every later import of it.

    The entry point in the group torch.backends, and `fla_kda_backend.register`. Idempotent; never raises. Returns True if
    chunk_kda is registered, False if FLA is not imported yet or the registration failed; `fla-kda doctor` tells which.
    """
    global failure
    try:
        finder = installed_finder()
        if finder is None:
            finder = Finder()
            sys.meta_path.insert(0, finder)
        if entry_points():
            return register_now()
        finder.late = any(name in sys.modules for name in WATCHED)
    except Exception as error:
        failure = error
    return False


def register_now() -> bool:
    global failure
    try:
        from . import registration

        failure = None
        return registration.register(entry_points())
    except Exception as error:
        failure = error
        return False


def entry_points() -> "list[Callable[..., Any]]":
    """The chunk_kda functions that FLA has defined by now: two, if one of the modules was loaded again."""
    found: list[Callable[..., Any]] = []  # an annotation that is not evaluated
    for name in WATCHED:
        # A module that is still being executed counts as soon as the function is in it: it is decorated by then.
        entry_point = getattr(sys.modules.get(name), "chunk_kda", None)
        if entry_point is not None and entry_point not in found:
            found.append(entry_point)
    return found


def status() -> tuple[str, str]:
    """(state, detail) of the registration.

    States: registered; waiting, FLA's KDA not being imported yet; failed; dispatch_disabled, FLA asking no backend in
    this process; off, without an import hook.
    """
    if failure is not None:
        return "failed", f"{type(failure).__name__}: {failure}"
    registration = sys.modules.get(f"{__package__}.registration")
    attempted = None if registration is None else registration.status()
    if attempted is not None:
        return attempted
    if installed_finder() is not None:
        return "waiting", f"{PACKAGE} is not imported yet"
    return "off", "no import hook: torch is not imported, or TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def installed_finder() -> "Any":
    return next((finder for finder in sys.meta_path if getattr(finder, "is_fla_kda_backend", False)), None)


class Finder:
    """A meta-path finder that lets the other finders find the watched modules, and wraps their loader."""

    is_fla_kda_backend = True

    def __init__(self) -> None:
        self.late = False  # a watched module was half loaded when the hook came: look again at every later import
        # (thread, name) of running searches: a finder that itself asks all finders must not come back in here.
        self._searching: set[tuple[int, str]] = set()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname not in WATCHED:
            if self.late:
                self._look_again()
            return None
        search = (get_ident(), fullname)
        if search in self._searching:
            return None
        self._searching.add(search)
        try:
            return self._wrapped(fullname, path, target)
        except Exception:
            return None  # the import goes on to the other finders, and raises there what it would have raised without us
        finally:
            self._searching.discard(search)

    def _wrapped(self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None") -> "ModuleSpec | None":
        for finder in tuple(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = RegisteringLoader(spec.loader)
                return spec
        return None

    def _look_again(self) -> None:
        try:
            if entry_points():
                self.late = False
                register_now()
        except Exception:
            self.late = False


class RegisteringLoader:
    """Stands in for a watched module's loader until the module is executed, then registers the backend."""

    def __init__(self, own: "Any") -> None:
        self._own = own

    def __getattr__(self, name: str) -> "Any":
        if name == "_own":  # a copy or an unpickled one, before it has its attributes
            raise AttributeError(name)
        return getattr(self._own, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._own.create_module(spec)

    def exec_module(self, module: "Any") -> None:
        # Before the module runs, so that its own code, and everybody after it, sees the loader that it would have had.
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        # A package without chunk_kda is an FLA that we do not know: registration reports it.
        if module.__name__ == PACKAGE or "chunk_kda" in vars(module):
            register_now()
