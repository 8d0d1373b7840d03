"""What torch calls while it is imported: watch for FLA's KDA, and register the backend once it is there.

An exception here would break `import torch` for everybody, and every process pays for the time spent here. So next to
nothing is imported, nothing is allowed to raise, FLA is never imported from here, and no import lock is waited for.

The hook stays in `sys.meta_path`, so a module that is imported again or reloaded, with a new chunk_kda in it, is
registered again. A forked child inherits it; a spawned one gets its own when it imports torch.
"""

import sys
from _thread import get_ident

# The module that defines chunk_kda, and the package that users import it from.
MODULE, PACKAGE = WATCHED = ("fla.ops.kda.chunk", "fla.ops.kda")

failure = None  # an exception on the way to registration.py, which keeps its own


def register():
    """Register the backend with FLA if FLA's chunk_kda is imported by now, and watch for every later import of it.

    The entry point in the group torch.backends, and `fla_kda_backend.register`. Idempotent; never raises. Returns True
    if chunk_kda is registered, False if FLA is not imported yet or the registration failed: `fla-kda doctor` tells
    which, and why.
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


def register_now():
    global failure
    try:
        from . import registration

        failure = None
        return registration.register(entry_points())
    except Exception as error:
        failure = error
        return False


def entry_points():
    """The chunk_kda functions that FLA has defined by now: two, if one of the modules was loaded again."""
    found = []
    for name in WATCHED:
        # A module that is still being executed counts as soon as the function is in it: it is decorated by then.
        entry_point = getattr(sys.modules.get(name), "chunk_kda", None)
        if entry_point is not None and entry_point not in found:
            found.append(entry_point)
    return found


def status():
    """(state, detail) of the registration, two strings.

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


def installed_finder():
    return next((finder for finder in sys.meta_path if getattr(finder, "is_fla_kda_backend", False)), None)


class Finder:
    """A meta-path finder that lets the other finders find the watched modules, and wraps their loader."""

    is_fla_kda_backend = True

    def __init__(self):
        self.late = False  # a watched module was half loaded when the hook came: look again at every later import
        self._searching = set()  # (thread, name): a finder that also asks all the others must not get back in here

    def find_spec(self, fullname, path=None, target=None):
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
            return None  # the import goes on to the other finders, and raises there what it would have raised
        finally:
            self._searching.discard(search)

    def _wrapped(self, fullname, path, target):
        for finder in tuple(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = RegisteringLoader(spec.loader)
                return spec
        return None

    def _look_again(self):
        try:
            if entry_points():
                self.late = False
                register_now()
        except Exception:
            self.late = False


class RegisteringLoader:
    """Stands in for a watched module's loader until the module is executed, then registers the backend."""

    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def create_module(self, spec):
        return self._own.create_module(spec)

    def exec_module(self, module):
        # Before the module runs: its own code, and everybody after it, sees the loader that it would have had.
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        # A package without chunk_kda is not the FLA we know: registration says so.
        if module.__name__ == PACKAGE or "chunk_kda" in vars(module):
            register_now()
