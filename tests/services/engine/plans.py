"""Build the configurations of engines that no test starts."""

import warnings

from baton.services.config import load
from baton.services.engine.build import EnginePlan, build_config
from harness.deployment import MODEL


def plan(model=MODEL, *, needs_handoffs=False, encodes=False, gang=None, **engine):
    settings = load({"engine": {"model": str(model), **engine}})
    return EnginePlan(settings, "w", "f00", needs_handoffs, encodes, gang=gang)


def built(model=MODEL, **how):
    """Return the VllmConfig; the parameters are those of `plan`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_config(plan(model, **how))
