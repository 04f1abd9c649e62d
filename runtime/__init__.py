"""The runtime: executes a static plan. ``from runtime import load``."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.sampling import Sampling
    from runtime.session import FinishReason, Generation, Session, load

__all__ = ["FinishReason", "Generation", "Sampling", "Session", "load"]


def __getattr__(name: str) -> Any:
    # Late, so that reading a plan does not load the execution engine.
    if name in ("FinishReason", "Generation", "Session", "load"):
        from runtime import session

        return getattr(session, name)
    if name == "Sampling":
        from runtime.sampling import Sampling

        return Sampling
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
