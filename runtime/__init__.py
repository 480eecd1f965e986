"""Run an engine artifact: `runtime.generate(path, "Once upon a time")`, or `runtime.load(path).submit(...)`.

Imports numpy alone at first, tokenizers and jinja2 when an artifact needs them; never torch, transformers
or sympy.
"""

from runtime.artifact import Artifact
from runtime.completion import Completion, Event, Timings, TokenLogprob
from runtime.engine import Engine
from runtime.errors import ArtifactError, EngineError, OctavoError, RequestError, ResourceError
from runtime.generate import generate
from runtime.load import load
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
