"""Run an engine artifact: `runtime.generate(path, "Once upon a time")`, or `runtime.load(path).submit(...)`.

Each name is imported when it is first used, so that `import runtime` takes no time: then numpy and what
reads tokenizers and templates when an artifact has them; never torch, transformers or sympy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.completion import Completion, Event, Timings, TokenLogprob
    from runtime.engine import Engine
    from runtime.errors import ArtifactError, EngineError, OctavoError, RequestError, ResourceError
    from runtime.generation import generate
    from runtime.loading import load
    from runtime.log import LogEntry
    from runtime.memory.plan import MemoryPlan
    from runtime.memory.target import plan
    from runtime.prefix import Prefix
    from runtime.request import Request
    from runtime.sampling import Sampling
    from runtime.stats import Stats

__all__ = [
    "Artifact", "ArtifactError", "Completion", "Engine", "EngineError", "Event", "LogEntry", "MemoryPlan",
    "OctavoError", "Prefix", "Request", "RequestError", "ResourceError", "Sampling", "Stats", "Timings",
    "TokenLogprob", "generate", "load", "plan",
]  # fmt: skip

_HOMES = {
    "artifact": ("Artifact",),
    "completion": ("Completion", "Event", "Timings", "TokenLogprob"),
    "engine": ("Engine",),
    "errors": ("ArtifactError", "EngineError", "OctavoError", "RequestError", "ResourceError"),
    "generation": ("generate",),
    "loading": ("load",),
    "log": ("LogEntry",),
    "memory.plan": ("MemoryPlan",),
    "memory.target": ("plan",),
    "prefix": ("Prefix",),
    "request": ("Request",),
    "sampling": ("Sampling",),
    "stats": ("Stats",),
}


def __getattr__(name: str) -> Any:
    """PEP 562: of a public name, its module's; whoever asks again finds it here."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"runtime.{home}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
